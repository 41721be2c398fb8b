"""Calls written as JSON objects: `{"name": …, "arguments": {…}}` and variants."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

from common.formats.answer import Call
from common.formats.cursor import SPACE, Cursor, Cut, Unreadable, Wait
from common.formats.json_text import Send
from common.formats.pythonic import NAME, at_named_call, read_fence, read_pythonic
from common.formats.reading import Reading
from common.formats.string_literals import read_source
from common.formats.tool_schema import ToolSchemas, arguments_of
from common.formats.values import (
    MODEL_JSON,
    Dialect,
    object_of,
    parts,
    read_value,
    string_of,
)

_NAMES = (
    *("name", "function", "tool_name", "tool", "function_name", "action", "func"),
    *("tool_call", "function_call", "recipient_name"),
)
_ARGUMENTS = (
    *("arguments", "parameters", "args", "input", "params", "kwargs"),
    *("tool_arguments", "tool_args", "tool_input", "action_input"),
)
_LISTS = ("tool_calls", "calls", "tool_uses")
_NO_ALIASES: Mapping[str, str] = {}
_EXTRAS = frozenset({"id", "type", "index", "call_id", "tool_call_id"})
_KEYS = _EXTRAS.union(_NAMES, _ARGUMENTS, _LISTS)
_SPELT = frozenset({"name", "function", "arguments", "parameters"})
"""Keys that are recognised in any case, and with space around them."""
_KEY, _KEY_RUN, _QUOTES = re.compile(r"\w+"), re.compile(r"\w*"), re.compile(r"""[\s"'“”]*""")
_SPACE = re.compile(r"\s+")
_OPENINGS = ("{", '{"type":"function",', '{"type":"function","function":{', '{"function":{')
_BETWEEN_ITEMS = re.compile(r"[},\s]*")
_FENCE = "```"


def read_arguments(
    reading: Reading,
    ends: tuple[str, ...] = (),
    dialect: Dialect = MODEL_JSON,
    typed: str = "",
) -> Wait[str]:
    """Read the arguments of the open call, and send them as they come.

    They may be in a code block.

    Arguments inside a JSON string are sent when the string is complete. A closing bracket too many
    before an end is repaired.

    typed: the tool whose schema may give strings another type.
    """
    fence = yield from read_fence(reading)
    if fence and (yield from reading.accept(fence)):
        return "{}"
    ends = (fence, *ends) if fence else ends
    members = yield from _at_members(reading)
    send = reading.send if members or (yield from reading.peek()) == "{" else None

    def converter(key: str) -> Callable[[str], str] | None:
        argument = string_of(key) or ""
        return (
            partial(_retyped, reading.tools, typed, argument)
            if reading.tools.excludes_text(typed, argument)
            else None
        )

    tools = reading.tools
    declared = {key: "string" in tools.types_at(typed, (key,)) for key in tools.properties(typed)}
    value = yield from read_value(
        reading,
        dialect,
        ends,
        send=send,
        converter=converter,
        declared=declared,
        unbraced=members,
    )
    arguments = arguments_of(value)
    if arguments is None:
        raise Unreadable
    yield from reading.drop_surplus(ends)
    yield from reading.accept_after_space(fence)
    yield from reading.drop_cut(ends)
    return arguments


def _retyped(tools: ToolSchemas, name: str, argument: str, value: str) -> str:
    text = string_of(value)
    return value if text is None else tools.retyped(name, argument, text)


def _calls_of(text: str, reading: Reading, *, strict: bool = False) -> list[Call]:
    """Return the calls in a JSON object or list.

    strict: whether the text must contain nothing else, and only the usual keys.
    """
    tools, keyed = reading.tools, reading.keyed and not strict
    aliases = _NO_ALIASES if strict else reading.aliases
    text = arguments_of(text) or text if text.startswith('"') else text
    members = _members(text)
    listed = members.get(_first(_LISTS, members), "")
    if listed.startswith("[") and not members.keys() - {*_LISTS, *_EXTRAS}:
        text = listed
    items = [value for _, value in parts(text)] if text.startswith("[") else [text]
    if not items:
        raise Unreadable
    texts = [arguments_of(item) or "" if item.startswith('"') else item for item in items]
    objects = [_members(item, aliases) for item in texts]
    return [call for each in objects for call in _calls_in(each, tools, strict, keyed)]


def _calls_in(members: dict[str, str], tools: ToolSchemas, strict: bool, keyed: bool) -> list[Call]:
    """Return the call in an object, or the calls if its keys are the names of tools."""
    named = keyed and len(members) == 1 and not members.keys() & _KEYS
    if members and not strict and (named or all(_is_tool(key, tools) for key in members)):
        given = {tools.meant(key): arguments_of(value) for key, value in members.items()}
        if None in given.values():
            raise Unreadable
        return [Call(name, arguments or "{}") for name, arguments in given.items()]
    return [_call_of(members, tools, strict)]


def _is_tool(key: str, tools: ToolSchemas) -> bool:
    return key not in _KEYS and tools.meant(key) in tools


def _call_of(members: dict[str, str], tools: ToolSchemas, strict: bool) -> Call:
    identity = string_of(members.get("id", "")) or string_of(members.get("call_id", "")) or ""
    if members.get(_first(_NAMES, members), "").startswith("{"):
        members = _members(members[_first(_NAMES, members)])
    name_key, arguments_key = _first(_NAMES, members), _first(_ARGUMENTS, members)
    name = string_of(members.get(name_key, ""))
    arguments = arguments_of(members.get(arguments_key))
    others = members.keys() - _EXTRAS - {name_key, arguments_key}
    if not name or arguments is None or (strict and (others or not arguments_key)):
        raise Unreadable
    name = tools.meant(name)
    if not arguments_key:  # the arguments may be beside the name
        declared = set(tools.properties(name))
        arguments = object_of([item for item in members.items() if item[0] in others & declared])
    return Call(name, arguments, identity)


def _members(text: str, aliases: Mapping[str, str] = _NO_ALIASES) -> dict[str, str]:
    """Return an object's members; of repeated keys the first, which may have been sent."""
    found: dict[str, str] = {}
    for key, value in parts(text) if text.startswith("{") else ():
        found.setdefault(_usual(key, aliases), value)
    return found


def _usual(key: str, aliases: Mapping[str, str]) -> str:
    """Return the usual key for one that a format or a model writes in another way."""
    spelt = key.strip().lower()
    return aliases.get(key, spelt if spelt in _SPELT else key)


def _first(keys: tuple[str, ...], members: Collection[str]) -> str:
    """Return the first member whose key is one of `keys`; '' if there is none."""
    return next((key for key in members if key in keys), "")


class _CallSender:
    """Sends a call while its object is read, if its name comes before its arguments.

    outer: the members of the object around it, if the call is the value of a key `function`.
    """

    def __init__(self, reading: Reading, outer: _CallSender | None = None) -> None:
        self._reading = reading
        self._outer = outer
        self._seen: dict[str, list[str]] = {}

    def member(self, key: str, head: str) -> Send | None:
        key = _usual(string_of(key) or "", self._reading.aliases)
        if key in self._seen:
            return None
        self._seen[key] = []
        if head == "{" and len(self._seen) == 1 and _is_tool(key, self._reading.tools):
            self._reading.begin(key)
            return self._reading.send
        if key not in _ARGUMENTS or head != "{":
            return self._seen[key].append
        texts = self._texts()
        name = string_of(texts.get(_first(_NAMES, texts), ""))
        if not name or _first(_ARGUMENTS, texts) != key or self._seen.keys() - _KEYS:
            return None
        texts = self._outer._texts() if self._outer else texts
        identity = string_of(texts.get("id", "")) or string_of(texts.get("call_id", ""))
        self._reading.begin(name, identity or "")
        return self._reading.send

    def inside(self, key: str) -> _CallSender | None:
        key = _usual(string_of(key) or "", self._reading.aliases)
        nested = self._outer is None and key == _first(_NAMES, self._seen)
        return (
            _CallSender(self._reading, self) if nested and not self._seen.keys() - _KEYS else None
        )

    def _texts(self) -> dict[str, str]:
        return {key: "".join(chunks) for key, chunks in self._seen.items()}


def read_json_calls(reading: Reading, ends: tuple[str, ...] = ()) -> Wait[None]:
    """Read a call, several on lines, or a list of calls, which may be in a code block.

    One bracket too few or too many before an end is repaired. A call may also be Python's, or a
    name before an object.
    """
    fence = yield from read_fence(reading)
    sign = yield from at_named_call(reading)
    if sign == "(":
        yield from read_pythonic(reading, (fence, *ends) if fence else ends, offered=False)
    elif sign:
        name = yield from reading.run(NAME)
        yield from reading.space()
        reading.begin(name)
        reading.call(Call(name, (yield from read_arguments(reading, ends))))
    elif (yield from reading.accept("[")):
        yield from _read_json_list(reading, ends)
    else:
        yield from _read_json_call(reading, ends)
        while (yield from _accept_separator(reading)):
            yield from _read_json_call(reading, ends)
    yield from reading.drop_surplus((fence, *ends) if fence else ends)
    yield from reading.accept_after_space(fence)


def at_plain_calls(reading: Reading) -> Wait[bool]:
    """Return whether JSON comes next, or a call with brackets after the tool's name."""
    if (yield from reading.at(["{", "[", "`", '"{', '"['])):
        return not (yield from reading.follow("`", _KEY, "`"))  # a name
    return bool((yield from at_named_call(reading)) or (yield from _at_members(reading)))


def _at_members(reading: Reading) -> Wait[bool]:
    """Return whether the members of an object come next, without its first brace.

    Without quotes, the first one must be the name of an offered tool.
    """
    if (yield from reading.follow('"', _KEY, '":')):
        return True
    found = yield from reading.follow(_KEY, ":", _QUOTES, NAME)
    return bool(found) and found[0] in _NAMES and reading.tools.meant(found[3]) in reading.tools


def _accept_separator(reading: Reading) -> Wait[bool]:
    """Read the separator between two calls, if another call follows."""
    with reading.ahead() as keep:
        _, separator, _ = yield from reading.accept_all(SPACE, (";", ",", ""), SPACE)
        head = yield from reading.peek()
        if head == "{" or (separator and not head):
            keep()
    return head == "{"


def _read_json_list(reading: Reading, ends: tuple[str, ...]) -> Wait[None]:
    yield from reading.space()
    readable = False
    while True:
        readable = (yield from _read_item(reading, ends)) or readable
        yield from reading.run(_BETWEEN_ITEMS)
        if readable:
            reading.settle()
        if not (yield from reading.more()) or (yield from reading.at(["]", *ends])):
            break
    if not readable:
        raise reading.unreadable()
    if not (yield from reading.at(ends)):
        yield from reading.expect("]")
    reading.settle()


def _read_item(reading: Reading, ends: tuple[str, ...]) -> Wait[bool]:
    """Read one entry of a list, or skip an entry that is no call. Returns whether it was a call."""
    called = reading.answer.calls
    place = reading.save()
    try:
        yield from _read_json_call(reading, ends)
        return True
    except Cut:
        raise
    except Unreadable:
        reading.restore(place)
        reading.answer.abandon()
        sent = reading.answer.calls > called
        if sent or not (yield from read_source(reading, ends)):
            raise
        return False
    finally:
        reading.release()


def _read_json_call(reading: Reading, ends: tuple[str, ...]) -> Wait[None]:
    members = yield from _at_members(reading)
    value = yield from read_value(
        reading, MODEL_JSON, ends, receiver=_CallSender(reading), unbraced=members
    )
    for call in _calls_of(value, reading):
        reading.call(call)


def may_be_bare(text: str, names: Collection[str]) -> bool:
    """Return whether a truncated text is the beginning of a call to one of these tools."""
    packed = _SPACE.sub("", text).removeprefix("[")
    begun = [
        f'{opening}"{key}":"{name}"' for opening in _OPENINGS for key in _NAMES for name in names
    ]
    begun += [f"{name}(" for name in names]
    return any(call.startswith(packed) or packed.startswith(call) for call in begun)


def read_bare_calls(reading: Reading, closers: tuple[str, ...] = ()) -> Wait[None]:
    """Read calls without an opening marker, separated by semicolons; nothing else may be there.

    If the family has closing markers, one of them or the end of the text must follow. A call to a
    name that was not offered counts only if it is the whole answer, in the family's own syntax.
    """
    alone = reading.answer.fresh
    while True:
        yield from _expect_call(reading, alone)
        receiver = None if closers or not alone else _CallSender(reading)
        value = yield from read_value(reading, MODEL_JSON, receiver=receiver)
        found = _calls_of(value, reading, strict=True)
        yield from reading.drop_surplus(closers)
        over = yield from reading.is_last()
        closed = (yield from reading.after_space(closers))[1]
        with reading.ahead():
            between = "".join((yield from reading.accept_all(SPACE, (";", ",", ""), SPACE)))
            separator = between.strip()
            head = yield from reading.peek()
            another = head in ("{", "[") if separator or "\n" in between else False
            another = another or (bool(separator) and not head)
        if closers and not (over or closed or another):
            raise Unreadable
        offered = all(call.name in reading.tools for call in found)
        if not offered and not (alone and (closed if closers else over or another)):
            raise Unreadable
        for call in found:
            reading.call(call)
        if not another:
            return
        reading.take(len(between))
        if not (yield from reading.more()):
            return
        reading.begun = bool(separator)  # which can only belong to a call


def read_code_blocks(reading: Reading) -> Wait[None]:
    """Read code blocks that contain nothing but calls.

    In a code block of any language, only calls of offered tools count.
    """
    marked = reading.opener != _FENCE
    reading.offered = reading.offered or not marked
    fence: tuple[str, ...] = (_FENCE,)
    while fence:
        yield from read_fence(reading)
        reading.begun = marked and (yield from reading.peek()) == "{"
        yield from read_bare_calls(reading, (_FENCE,))
        yield from reading.accept_after_space(_FENCE)
        fence = yield from reading.follow(SPACE, _FENCE)


def _expect_call(reading: Reading, alone: bool) -> Wait[None]:
    """Raise for JSON that does not begin like a call, so that it can be output as text.

    The keys are examined up to that of the arguments.
    """
    name = ""
    with reading.ahead():
        while True:
            key = yield from _read_key(reading)
            yield from reading.expect(":", "=")
            if key not in _KEYS:
                raise Unreadable
            yield from reading.space()
            head = yield from reading.peek()
            if key in _ARGUMENTS:
                if name and (yield from _is_schema(reading, name)):
                    raise Unreadable
                return
            if head in ("{", "["):
                continue
            value = string_of((yield from read_value(reading, MODEL_JSON)))
            if key in _NAMES:
                name = reading.tools.meant(value or "")
                if name in reading.tools:
                    reading.begun = reading.begun or alone
                elif not alone:
                    raise Unreadable
            yield from reading.accept_all(SPACE, (",", ""), SPACE)
            if (yield from reading.peek()) == "/":
                return  # a comment


def _read_key(cursor: Cursor) -> Wait[str]:
    """Read the next key, and the brackets before it; no more, so that parsing time stays linear."""
    before = (("[", ""), SPACE, ("{", "{{", ""), SPACE, _QUOTES)
    return (yield from cursor.accept_all(*before, _KEY_RUN, _QUOTES))[-2]


def _is_schema(reading: Reading, name: str) -> Wait[bool]:
    """Return whether a tool's schema comes next: a description of a tool has it as arguments."""
    key = yield from _read_key(reading)
    if key not in ("type", "properties") or key in reading.tools.properties(name):
        return False
    yield from reading.accept(":")
    yield from reading.run(_QUOTES)
    return bool((yield from reading.at(["{"] if key == "properties" else ["object"])))
