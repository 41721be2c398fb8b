"""Calls with each argument in its own tags, as in `<parameter=city>Paris</parameter>`.

A value is raw text and may contain anything, even the family's own tags. A closing tag ends the
value only if valid syntax follows it; complete calls quoted inside the value are skipped by
counting them. A missing closing tag is tolerated if the next element can only follow it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from common.formats.answer import Call
from common.formats.cursor import Cursor, Cut, Markers, Unreadable, Wait, markers_of
from common.formats.json_calls import (
    arguments_of,
    at_plain_calls,
    read_arguments,
    read_json_calls,
)
from common.formats.json_text import Send, escaped, json_string
from common.formats.reading import Reading
from common.formats.tool_schema import Undeclared
from common.formats.values import Pairs, as_json, object_of, parts

_HEADER_RUN, _NAME_RUN = re.compile(r"[^<>\n]*"), re.compile(r"[^<>\n{]*")
_ATTRIBUTE = re.compile(
    r"""([\w-]+)\s*=\s*("(?:[^"]|"(?!\s*/?$|\s+[\w-]+\s*=))*"|'[^']*'|[^\s"'/>]+)"""
)
_WRAPPERS = frozenset({"arguments", "parameters", "properties", "input"})
_AROUND_ARGUMENTS = ("<parameters>", "</parameters>", "<arguments>", "</arguments>")
_CDATA_OPEN, _CDATA_CLOSE = "<![CDATA[", "]]>"

Lines = Literal["kept", "dropped", "paired"]
_BEHIND: Mapping[Lines, re.Pattern[str]] = {
    "kept": re.compile(r"(?:\r?\n)?\r?\Z"),
    "dropped": re.compile(r"(?:\r?\n)?\r?\Z"),
    "paired": re.compile(r"(?:\r?\n){0,2}\r?\Z"),
}
"""The line breaks at the end of a value that may turn out not to belong to it."""
_FIRST_BREAK, _LAST_BREAK = re.compile(r"\A\r?\n"), re.compile(r"\r?\n\Z")
_TYPED_BY = 64  # a longer value whose type is still open is sent only when it is complete


class _Quoted:
    """The quoted markup inside a value that is open, by its closing tags."""

    def __init__(self) -> None:
        self._tags: list[str] = []
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._tags)

    def open(self, closing: str) -> None:
        self._tags.append(closing)
        self._counts[closing] += 1

    def close(self, closing: str) -> bool:
        """Close the latest element with this tag, and those inside it; returns whether any is."""
        if not self._counts[closing]:
            return False
        latest = ""
        while latest != closing:
            latest = self._tags.pop()
            self._counts[latest] -= 1
        return True


class ValueSender:
    """Sends a value while it is read, as soon as it can only be a string."""

    def __init__(self, send: Send, is_text: Callable[[str], bool], lines: Lines = "kept") -> None:
        self._send = send
        self._is_text = is_text
        self.lines = lines
        self._text = ""  # text that was read and not sent yet
        self._streams_text: bool | None = None
        self.sent = 0
        self.quoted = _Quoted()
        self.quotes = False  # whether a quoted call has begun
        self.ends: tuple[str, ...] = ()  # closing tags of this value
        self.given: Collection[str] = ()  # keys of the call so far, this value's included
        self.declared: Collection[str] = ()  # keys that the tool declares

    def add(self, text: str) -> None:
        if self._streams_text is False:
            return
        self._text += text
        if self._streams_text is None:
            self._decide()
        if self._streams_text:
            end = len(self._text)
            if behind := _BEHIND[self.lines].search(self._text):
                end = behind.start()
            self._put(escaped(self._text[:end]))
            self._text = self._text[end:]

    def stop(self) -> None:
        """Stop sending text, because the following text may not belong to the value."""
        self._streams_text = False

    def whole(self, value: str) -> None:
        """End the value, with its complete JSON."""
        self._put(value[self.sent :])

    def _decide(self) -> None:
        if self.lines != "kept" and self._text == "\r":
            return
        if self._is_text(self._text):
            self._streams_text = True
            if self.lines != "kept":
                self._text = _FIRST_BREAK.sub("", self._text)
            self._put('"')
        elif len(self._text) > _TYPED_BY:
            self._streams_text = False

    def _put(self, text: str) -> None:
        self._send(text)
        self.sent += len(text)


def attributes_of(header: str) -> dict[str, str]:
    """Return the attributes of a tag, without quotes, with the two escapes of templates decoded.

    There are none if the header contains anything else; then it is not a tag of the family.
    """
    if _ATTRIBUTE.sub("", header).strip():
        return {}
    return {
        key: (value[1:-1] if value[0] in "\"'" else value)
        .replace("&quot;", '"')
        .replace("&amp;", "&")
        for key, value in _ATTRIBUTE.findall(header)
    }


def respelt(tag: str) -> tuple[str, ...]:
    """Return a closing tag, and how models write it if they confuse its brackets."""
    word = tag.strip("<>/|")
    forms = ("<{}|>", "<|{}|>", "<|/{}|>", "</{}|>", "/{}>", "{}>")
    return (tag, *(form.format(word) for form in forms)) if word else ()


def forms(tag: str) -> tuple[str, ...]:
    """Return a tag, also without its last or its first bracket."""
    return (tag, tag.removesuffix(">"), tag[1:]) if tag.startswith("<") else (tag,)


def keyed(header: str) -> dict[str, str]:
    """Return the attributes of a header that is only a key, as in `<parameter=KEY>`."""
    key = header.strip().strip("\"'")
    return {"name": key} if key else {}


def named(header: str) -> dict[str, str]:
    """Return the attributes of a header that is only a name, as in `<function=NAME>`."""
    return keyed(header) if len(header.split()) == 1 else {}


@dataclass(frozen=True)
class CallTags:
    """The tags of a family. Opening tags are given up to the header with the name."""

    call: str
    call_close: str
    parameter: str
    parameter_close: str
    header_close: str = ">"
    header: Callable[[str], Mapping[str, str]] = attributes_of
    parameter_header: Callable[[str], Mapping[str, str]] = attributes_of
    block: str = ""
    block_close: str = ""
    name_key: str = "name"
    parameter_key: str = "name"
    lines: Lines = "kept"
    """Line breaks around a value: `dropped` if the template writes them; `paired` if it does not,
    and the last one is dropped only after a first one.
    """
    cdata: bool = False
    """Text that could be mistaken for markup is in a CDATA section."""
    undeclared: Undeclared = "text"
    text_flag: tuple[str, str] = ("", "")
    """The attribute, and its value, that mark a value as text."""
    json_block: str = ""
    """The tags around arguments that are written as one JSON object."""
    json_close: str = ""
    _closing: Mapping[str, str] = field(init=False, repr=False, compare=False)
    _tags: Markers = field(init=False, repr=False, compare=False)
    _ends: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The closing tag of a parameter, also without a bracket."""

    def __post_init__(self) -> None:
        closing = {
            self.block: self.block_close,
            self.call: self.call_close,
            self.parameter: self.parameter_close,
        }
        ends = forms(self.parameter_close)
        object.__setattr__(self, "_closing", closing)
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "_tags", Markers([*closing, *closing.values(), *ends]))

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block, self.call)))

    @property
    def closers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block_close, self.call_close)))

    def read(self, reading: Reading) -> Wait[None]:
        """Read a block of calls, or calls without the block's tags."""
        cursor = reading.cursor
        respelt_block = "" if reading.opener.startswith(forms(self.call)) else reading.opener
        in_block = bool((yield from cursor.accept(*forms(self.block), respelt_block)))
        if tags := (yield from self._without_brackets(reading)):
            yield from cursor.space()
            yield from tags.read(reading)
            return
        ends = respelt(self.block_close)
        count = 0
        while True:
            if in_block or count:
                space = yield from self._space_before_call(reading)
                if space is None:
                    break
                cursor.take(space)
            if in_block and (yield from at_plain_calls(reading)):
                yield from read_json_calls(reading, ends)
            else:
                yield from self._read_calls(reading)
            count += 1
        yield from cursor.accept_after_space(*ends)
        if not count:
            raise cursor.unreadable()

    def _without_brackets(self, reading: Reading) -> Wait[CallTags | None]:
        """Return the tags with which a call is written here whose first angle bracket is missing.

        The others may be missing too. The call must name an offered tool.
        """
        cursor = reading.cursor
        if not self.call.startswith("<"):
            return None
        with cursor.ahead():
            yield from cursor.space()
            if not (yield from cursor.accept(self.call[1:])):
                return None
            try:
                name, _, _ = yield from self._read_call_header(cursor)
            except Unreadable:
                return None
            yield from cursor.space()
            bare = not (yield from cursor.at(["<"]))
        if reading.tools.meant(name) not in reading.tools:
            return None
        half = replace(self, call=self.call[1:])
        if not bare:
            return half
        close, parameter_close = self.call_close[2:], self.parameter_close[2:]
        return replace(
            half, call_close=close, parameter=self.parameter[1:], parameter_close=parameter_close
        )

    def _space_before_call(self, reading: Reading) -> Wait[int | None]:
        """Return the length of the space before the next call of the block; None if there is none.

        Calls that are objects may have a comma between them.
        """
        cursor = reading.cursor
        start = cursor.position
        with cursor.ahead():
            yield from cursor.space()
            if not (yield from cursor.at([self.call])):
                comma = yield from cursor.accept(",")
                yield from cursor.space()
                if comma and not (yield from cursor.more()) and reading.was_cut():
                    raise Cut
                if not (yield from at_plain_calls(reading)):
                    return None
            return cursor.position - start

    def _read_call_header(self, cursor: Cursor) -> Wait[tuple[str, bool, str]]:
        """Return a call's name, whether its tag is self-closing, and its id."""
        header, closed = yield from self._read_header(cursor)
        attributes = self.header(header)
        return attributes.get(self.name_key, ""), closed, attributes.get("id", "")

    def _read_parameter_header(self, cursor: Cursor) -> Wait[tuple[Mapping[str, str], bool]]:
        """Return the attributes of a parameter's tag whose beginning was read, and whether it is
        self-closing.
        """
        header, closed = yield from self._read_header(cursor)
        return self.parameter_header(header), closed

    def _read_header(self, cursor: Cursor) -> Wait[tuple[str, bool]]:
        """Return the header of a tag whose beginning was read, and whether it is self-closing."""
        text: list[str] = []
        if self.header_close == ">":
            run = _NAME_RUN if self.header is named else _HEADER_RUN
            text.append((yield from cursor.run(run)))
        else:
            yield from cursor.until(markers_of(self.header_close, "\n"), text.append)
        # The `>` of a tag such as `<function=NAME>` may be missing before a tag, a line or a brace.
        if self.header_close != ">" or (yield from cursor.peek()) not in ("\n", "<", "{"):
            yield from cursor.expect(self.header_close)
        header = "".join(text)
        return header.rstrip("/"), header.endswith("/")

    def _read_calls(self, reading: Reading) -> Wait[None]:
        reading.call((yield from self.read_call(reading)))

    def read_call(self, reading: Reading) -> Wait[Call]:
        yield from reading.cursor.expect(self.call)
        return (yield from self.read_inside(reading))

    def read_inside(self, reading: Reading) -> Wait[Call]:
        """Read a call from its name on."""
        cursor = reading.cursor
        name, closed, identity = yield from self._read_call_header(cursor)
        if not name:
            raise cursor.unreadable()
        name = reading.tools.meant(name)
        arguments: list[tuple[str, str]] = []
        reading.begin(name, identity)
        while not closed:
            yield from self._gap(cursor)
            if (yield from self._accept_close(cursor)):
                break
            if (yield from self._opens_parameter(cursor)):
                yield from self._read_parameter(reading, name, arguments)
            elif element := (yield from cursor.accept(*_elements(reading, name, arguments))):
                yield from self._read_parameter(reading, name, arguments, element[1:-1])
            elif self.json_block and (yield from cursor.accept(self.json_block)):
                yield from self._read_header(cursor)
                return Call(name, (yield from self._read_json(reading)), identity)
            elif not arguments and (yield from cursor.peek()) in ("{", '"'):
                return Call(name, (yield from self._read_json(reading)), identity)
            elif not arguments and (yield from self._repeats_header(reading, name)):
                continue
            elif (yield from self._left_open(reading, name, arguments)):
                break
            else:
                raise cursor.unreadable()
        return Call(name, _unwrapped(reading, name, arguments) or object_of(arguments), identity)

    def read_parameters(self, reading: Reading, name: str) -> Wait[list[tuple[str, str]]]:
        """Read the parameters of a call that has no tags of its own."""
        arguments: list[tuple[str, str]] = []
        yield from self._gap(reading.cursor)
        while (yield from self._opens_parameter(reading.cursor)):
            yield from self._read_parameter(reading, name, arguments)
            yield from self._gap(reading.cursor)
        return arguments

    def _accept_close(self, cursor: Cursor) -> Wait[bool]:
        """Read a call's closing tag, of which a bracket may be missing; returns whether it came."""
        found = yield from cursor.at(forms(self.call_close))
        length = len(found)
        if found and found == self.call_close.removesuffix(">"):
            with cursor.ahead():
                cursor.take(length)
                length += yield from _repeated_name(cursor)
                head = yield from cursor.peek()
            bare = length == len(found)
            if bare and (head not in ("", "\n", "\r", "<") or not (head or cursor.stopped)):
                return False
        return bool(cursor.take(length))

    def _gap(self, cursor: Cursor) -> Wait[None]:
        """Read what may be between two tags, such as tags around all arguments."""
        yield from cursor.space()
        while (yield from cursor.accept(*_AROUND_ARGUMENTS)):
            yield from cursor.space()

    @property
    def _parameters(self) -> tuple[str, ...]:
        """The beginning of a parameter's tag, also without its first bracket."""
        return tuple(dict.fromkeys((self.parameter, self.parameter.removeprefix("<"))))

    def _opens_parameter(self, cursor: Cursor) -> Wait[bool]:
        return bool((yield from cursor.accept(*self._parameters)))

    def _repeats_header(self, reading: Reading, name: str) -> Wait[bool]:
        """Read the beginning of the call if the model wrote it twice; returns whether it did."""
        cursor = reading.cursor
        with cursor.ahead() as keep:
            if not (yield from cursor.accept(self.call)):
                return False
            again, _, _ = yield from self._read_call_header(cursor)
            if reading.tools.meant(again) != name:
                return False
            keep()
        return True

    def _left_open(self, reading: Reading, name: str, arguments: Pairs) -> Wait[bool]:
        """Return whether the next text shows that the call has ended without its closing tag.

        At the end of the text, a call without a required argument counts as truncated.
        """
        cursor = reading.cursor
        if not (yield from cursor.more()):
            tools = reading.tools
            begun = arguments or (name in tools and not tools.properties(name))
            if reading.was_cut() or not begun or tools.lacks(name, (key for key, _ in arguments)):
                raise Cut
            return True
        following = filter(None, (*respelt(self.block_close), self.block, self.call))
        return bool((yield from cursor.at(following)))

    def _read_json(self, reading: Reading) -> Wait[str]:
        """Read arguments that are one JSON object, up to the end of the call."""
        cursor = reading.cursor
        ends = tuple(filter(None, (self.json_close, self.call_close)))
        text = yield from read_arguments(reading, ends)
        half = self.call_close.removesuffix(">")
        closings = (self.json_close,), _AROUND_ARGUMENTS, self._ends
        for closing in (*closings, (half, *respelt(self.call_close))):
            yield from cursor.accept_after_space(*closing)
        return text

    def _read_parameter(
        self, reading: Reading, name: str, arguments: list[tuple[str, str]], element: str = ""
    ) -> Wait[None]:
        """Read a parameter from behind the beginning of its tag.

        element: the key, if that was the whole tag.
        """
        cursor = reading.cursor
        attributes: Mapping[str, str] = {self.parameter_key: element}
        closed = False
        if not element:
            attributes, closed = yield from self._read_parameter_header(cursor)
        key = attributes.get(self.parameter_key)
        if key is None:
            raise cursor.unreadable()
        again = yield from cursor.at(self._parameters)
        if again and (yield from self._next_key(reading)) == key:  # the tag was written twice
            cursor.take(len(again))
            yield from self._read_parameter_header(cursor)
        value = self._value_sender(reading, name, key, attributes, arguments)
        value.ends = (f"</{key}>",) if element else (*self._ends, f"</{key}>")
        value.given = {key, *(k for k, _ in arguments)}
        value.declared = reading.tools.properties(name)
        if closed:
            arguments.append((key, self._typed(reading, name, "", attributes)))
        else:
            arguments.append((key, (yield from self._read_value(reading, name, attributes, value))))
        value.whole(arguments[-1][1])

    def _value_sender(
        self, reading: Reading, name: str, key: str, attributes: Mapping[str, str], arguments: Pairs
    ) -> ValueSender:
        """Return the sender for the next value; a value that may be all arguments is not sent."""
        first = arguments[0][0] if arguments else key
        wraps = first in _WRAPPERS and first not in reading.tools.properties(name)
        send = _discard if wraps else reading.send
        send(("{" if not arguments else ", ") + json_string(key) + ": ")
        flag, is_text = self.text_flag

        def known(text: str) -> bool:
            if flag in attributes:
                return attributes[flag] == is_text and not reading.tools.excludes_text(name, key)
            return reading.tools.is_text(name, key, text, self.undeclared)

        return ValueSender(send, known, self.lines)

    def _read_value(
        self, reading: Reading, name: str, attributes: Mapping[str, str], value: ValueSender
    ) -> Wait[str]:
        """Read a value and its closing tag; returns it as JSON."""
        text = yield from self._read_text(reading, value)
        if value.lines == "dropped" or (value.lines == "paired" and _FIRST_BREAK.match(text)):
            text = _LAST_BREAK.sub("", _FIRST_BREAK.sub("", text))
        return self._typed(reading, name, text, attributes)

    def _typed(self, reading: Reading, name: str, text: str, attributes: Mapping[str, str]) -> str:
        key, (flag, is_text) = attributes[self.parameter_key], self.text_flag
        if flag in attributes:
            if attributes[flag] == is_text:
                return reading.tools.retyped(name, key, text)
            return as_json(text) or reading.tools.typed(name, key, text, "guess")
        return reading.tools.typed(name, key, text, self.undeclared)

    def _read_text(self, reading: Reading, value: ValueSender) -> Wait[str]:
        """Read a value to its end; quoted calls are skipped, unless no end would remain.

        Where the length limit cuts a value after a quoted call, the end is missing.
        """
        cursor = reading.cursor
        place = cursor.save()
        try:
            if self.cdata and (yield from _opens_section(cursor)):
                value.lines = "kept"
                return (yield from self._scan_section(cursor, value))
            return (yield from self._scan_text(reading, value))
        except Cut:
            value.stop()
            if reading.was_cut():
                raise
            cursor.restore(place)
            yield from _opens_section(cursor)
            return (yield from self._scan_text(reading, value, skips_calls=False))
        finally:
            cursor.release()

    def _scan_section(self, cursor: Cursor, value: ValueSender) -> Wait[str]:
        """Read the rest of a CDATA section, and the end of the value after it."""
        chunks: list[str] = []

        def add(text: str) -> None:
            chunks.append(text)
            value.add(text)

        while True:
            marker = yield from cursor.inside(markers_of(_CDATA_CLOSE, self.parameter_close), add)
            with cursor.ahead():
                cursor.take(len(marker))
                yield from cursor.space()
                ends = (yield from cursor.at(self._ends)) or not (yield from cursor.more())
            if marker == _CDATA_CLOSE and ends:
                cursor.take(len(marker))
                yield from cursor.accept_after_space(*self._ends)
                return "".join(chunks)
            if marker != _CDATA_CLOSE:
                value.stop()  # the end of the section may be missing
            add(cursor.take(len(marker)))

    def _scan_text(
        self, reading: Reading, value: ValueSender, *, skips_calls: bool = True
    ) -> Wait[str]:
        cursor = reading.cursor
        chunks: list[str] = []
        tags = markers_of(*self._tags.literals, *value.ends)
        value.quoted = _Quoted()

        def add(text: str) -> None:
            chunks.append(text)
            value.add(text)

        while True:
            marker = yield from cursor.inside(tags, add)
            if value.quoted.close(marker):
                pass
            elif skips_calls and (yield from self._begins_quote(reading, marker, value)):
                value.quoted.open(self._closing[marker])
                value.quotes = True
                value.stop()
            elif (yield from self._ends_text(reading, marker, value)):
                if skips_calls and value.quotes and marker not in value.ends:
                    raise Cut  # the value's own closing tag was taken for one of the quoted call
                text = "".join(chunks)
                if cursor.take(len(marker) if marker in value.ends else 0):
                    cursor.take((yield from _repeated_name(cursor)))
                else:
                    text = text if self.lines == "dropped" else _LAST_BREAK.sub("", text)
                return text
            add(cursor.take(len(marker)))

    def _begins_quote(self, reading: Reading, marker: str, value: ValueSender) -> Wait[bool]:
        """Return whether a tag inside a value opens a quoted block, call or parameter.

        Raises Cut if the length limit leaves that open.
        """
        cursor = reading.cursor
        if marker == self.parameter:
            return bool(value.quoted) and (yield from self._next_key(reading)) is not None
        if marker not in (self.block, self.call):
            return False
        with cursor.ahead():
            if marker == self.block:
                cursor.take(len(marker))
                yield from cursor.space()
                if not (yield from self._follows(reading, [self.call])):
                    return False
            cursor.take(len(self.call))
            try:
                yield from self._read_call_header(cursor)
            except Unreadable as error:
                if isinstance(error, Cut) and reading.was_cut():
                    raise
                return False
            yield from cursor.space()
            return bool((yield from self._follows(reading, [self.parameter, self.call_close])))

    def _next_key(self, reading: Reading) -> Wait[str | None]:
        """Return the key of the parameter whose tag comes next; None if its header is not readable.

        Raises Cut if the length limit leaves that open.
        """
        cursor = reading.cursor
        with cursor.ahead():
            if not (yield from self._opens_parameter(cursor)):
                return None
            try:
                attributes, _ = yield from self._read_parameter_header(cursor)
            except Unreadable as error:
                if isinstance(error, Cut) and reading.was_cut():
                    raise
                return None
            return attributes.get(self.parameter_key)

    def _follows(self, reading: Reading, literals: list[str]) -> Wait[str]:
        """Return the literal that comes next; raises Cut if the length limit leaves that open."""
        cursor = reading.cursor
        found = yield from cursor.at(literals)
        if not found and reading.was_cut():
            with cursor.ahead():
                rest = cursor.rest()
            if any(literal.startswith(rest) for literal in literals):
                raise Cut
        return found

    def _ends_text(self, reading: Reading, marker: str, value: ValueSender) -> Wait[bool]:
        """Return whether the text after a closing tag shows that the tag ends the value.

        Raises Cut if the length limit leaves that open.
        """
        cursor = reading.cursor
        call_ends = forms(self.call_close)
        following = [t for t in (*call_ends, self.block_close, self.block, self.call) if t]
        if marker == self.parameter:
            key = yield from self._next_key(reading)
            return key in value.declared and key not in value.given
        if marker in (self.block, self.call):
            return False
        with cursor.ahead():
            cursor.take(len(marker))
            cursor.take((yield from _repeated_name(cursor)))
            yield from self._gap(cursor)
            ends = marker not in value.ends and not value.quotes
            if not (yield from cursor.more()) and (ends or not reading.was_cut()):
                return True
            if marker in value.ends:
                following += self._parameters
                following += [f"<{key}>" for key in value.declared if key not in value.given]
            elif marker == self.call_close:
                following = [t for t in following if t not in call_ends]
            else:
                following = [t for t in (self.block,) if t]
            found = yield from self._follows(reading, following)
            if found not in self._parameters:
                return bool(found)
            key = yield from self._next_key(reading)
            # A repeated key is a model's mistake, or belongs to a quoted call.
            return key is not None and not (value.quotes and key in value.given)


def _repeated_name(cursor: Cursor) -> Wait[int]:
    """Return the length of the rest of a closing tag that repeats a name, as `</parameter=KEY>`."""
    start = cursor.position
    with cursor.ahead():
        if not (yield from cursor.accept("=")):
            return 0
        yield from cursor.run(_NAME_RUN)
        return cursor.position - start if (yield from cursor.accept(">")) else 0


def _opens_section(cursor: Cursor) -> Wait[bool]:
    """Read the beginning of a CDATA section if one comes next; returns whether it did."""
    position = cursor.position
    yield from cursor.accept_after_space(_CDATA_OPEN)
    yield from cursor.drop_cut((_CDATA_OPEN,))
    return cursor.position > position


def _elements(reading: Reading, name: str, arguments: Pairs) -> tuple[str, ...]:
    """Return the tags of declared arguments that are named by the key alone, as `<KEY>`."""
    given = {key for key, _ in arguments}
    return tuple(f"<{key}>" for key in reading.tools.properties(name) if key not in given)


def _discard(_text: str) -> None:
    pass


def _unwrapped(reading: Reading, name: str, arguments: Pairs) -> str | None:
    """Return the arguments as an object; a model may put all of them as JSON into one value."""
    declared = set(reading.tools.properties(name))
    if len(arguments) == 1 and arguments[0][0] in _WRAPPERS - declared:
        inner = arguments_of(arguments[0][1])
        if inner and {key for key, _ in parts(inner)} & declared:
            return inner
    return None
