"""How a family writes calls: texts with placeholders, for the parser and the call grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from common.formats.cursor import SPACE, Wait
from common.formats.gemma import fenced_calls
from common.formats.glm import KeyValueTags
from common.formats.json_calls import read_bare_calls, read_json_calls
from common.formats.keyed_text import KeyedText
from common.formats.minimax_m3 import ElementTags
from common.formats.pythonic import read_fenced_pythonic, read_pythonic
from common.formats.reading import CallSyntax, Reading, always, begins_line, no_content_yet
from common.formats.sections import Section
from common.formats.tag_spelling import closings
from common.formats.tagged_calls import CallTags
from common.formats.tool_schema import Undeclared
from common.formats.value_sender import Lines

_KEYS = ("name", "arguments")
_KEY_OF = r'"(\w+)"\s*:\s*"?{{{}}}'
_JSON = (("[", ""), SPACE, "{")  # an object, or a list that begins with one
_LAST_PLACE = re.compile(r".*\{(?:name|arguments)\}", re.DOTALL)
_BEFORE_STRING = re.compile(r'(":|\{)\s*\Z')
_FIRST_TOKEN = re.compile(r"<[|｜][^<>]*>")
_TOKENS = re.compile(r"<\|[^<>]*\|>")
_TOKEN_OR_FENCE = re.compile("[|｜`]")
_OPENER = re.compile(r"<[^\s>]*>?|\S*")
_NAMED_ELEMENT = re.compile(
    r"\s*(<[^<>{}]+>|)\s*<\{name\}>\s*\{arguments\}\s*</\{name\}>\s*(<[^<>{}]+>|)\s*"
)
"""A call that is an element with the name of the tool, perhaps in a block."""
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_HEADER = re.compile(
    r'(.*?)(?: (\w+)="\{(?:name|key)\}"|\{(?:name|key)\})(?: (\w+)="\{flag\}")?(.*)', re.DOTALL
)
"""A tag up to its name or key, the attributes of that and of the flag, and the rest."""


@cache  # so that syntaxes of equal shapes are the same object
def json_block(
    opener: str,
    closer: str = "",
    begins: Callable[[Reading, str], bool] = always,
    keys: tuple[str, str] = ("name", "arguments"),
    keyed: bool = False,
) -> CallSyntax:
    """Return the syntax of calls as JSON after a marker.

    keys: the keys of the name and the arguments, besides the usual keys.
    keyed: whether the name is itself the key of the arguments.
    """
    aliases = {key: usual for key, usual in zip(keys, _KEYS, strict=True) if key != usual}

    def read(reading: Reading) -> Wait[None]:
        reading.aliases = aliases
        reading.keyed = keyed
        reading.take(len(reading.opener.rstrip("[{")))
        yield from reading.space()
        reading.begun = bool((yield from reading.at(["```"])))
        yield from read_json_calls(reading, closings(closer) if closer else ())
        yield from reading.accept_after_space(*closings(closer))

    return CallSyntax((opener,), read, (closer,) if closer else (), begins)


def _is_answer(reading: Reading, _opener: str) -> bool:
    return not reading.answer.reasoning


def read_unmarked(reading: Reading, ends: tuple[str, ...] = ()) -> Wait[None]:
    """Read JSON or a list of Python calls. Without a marker, only offered tools count as calls."""
    if (yield from reading.follow(*_JSON)):
        yield from read_bare_calls(reading, ends)
    else:
        yield from read_pythonic(reading, ends, offered=True)


def python_block(opener: str, closer: str = "", *, offered: bool = False) -> CallSyntax:
    """Return the syntax of calls after a marker, as JSON or in Python's notation.

    offered: whether only calls of offered tools count.
    """
    closers = (closer,) if closer else ()

    def read(reading: Reading) -> Wait[None]:
        reading.take(len(reading.opener))
        yield from reading.space()
        if (yield from reading.follow(*_JSON)):
            yield from read_json_calls(reading, closings(closer) if closer else (";",))
        elif not (yield from reading.at(closers)):
            yield from read_fenced_pythonic(reading, closers and closings(closer), offered=offered)
        yield from reading.accept_after_space(*closings(closer))

    return CallSyntax((opener,), read, closers)


def _unopened(closer: str) -> CallSyntax:
    """Return the syntax of Python calls at the beginning of the answer with a marker behind."""

    def read(reading: Reading) -> Wait[None]:
        yield from read_fenced_pythonic(reading, closings(closer), offered=True)
        yield from reading.space()
        yield from reading.expect(*closings(closer))

    return CallSyntax((), read, begins=no_content_yet, by_name=True, last=True)


UNMARKED = CallSyntax(("{", "["), read_unmarked, begins=_is_answer)


def tagged(tags: CallTags) -> CallSyntax:
    """Return the syntax of calls between tags."""
    return CallSyntax(tags.openers, tags.read, tags.closers)


def _elements(tags: CallTags) -> CallSyntax:
    """Return the syntax of calls that are elements with the names of offered tools."""
    return tagged(tags) if tags.block else CallSyntax(("<",), tags.read, begins=begins_line)


def _written(marker: str) -> tuple[str, ...]:
    """Return the marker without the space around it; nothing if there is none."""
    return (marker.strip(),) if marker.strip() else ()


@dataclass(frozen=True, slots=True)
class JsonShape:
    """The arguments of a call are one JSON object.

    call: the text of a call, with `{name}`, `{arguments}` and perhaps its number, `{index}`.
    pair: the text of an argument, with `{key}` and `{value}`, if the arguments are a list of these.
    """

    call: str
    opening: str = ""
    separator: str = ", "
    closing: str = ""
    several: bool = True
    pair: str = ""

    @property
    def quoted(self) -> bool:
        """Whether the name is in a JSON string."""
        return _BEFORE_STRING.search(self.call.partition("{name}")[0]) is not None

    @property
    def named_element(self) -> bool:
        """Whether a call is an element with the name of the tool."""
        return _NAMED_ELEMENT.fullmatch(self.call) is not None

    @property
    def in_string(self) -> bool:
        """Whether the arguments are in a JSON string."""
        return '"{arguments}"' in self.call

    @property
    def syntaxes(self) -> tuple[CallSyntax, ...]:
        if element := _NAMED_ELEMENT.fullmatch(self.call):
            block, close = self.opening.strip() or element[1], self.closing.strip() or element[2]
            return (_elements(CallTags("", "", "", "", block=block, block_close=close)),)
        if not self.quoted:
            return (self.section.syntax,)
        start = (self.opening + self.call).partition("{")[0].rstrip()
        end = _LAST_PLACE.sub("", self.call).lstrip('"}') + self.closing
        found = [re.search(_KEY_OF.format(usual), self.call) for usual in _KEYS]
        name, arguments = (
            key[1] if key else usual for key, usual in zip(found, _KEYS, strict=True)
        )
        keys, keyed = (name, arguments), self.call.startswith("{{name}")
        start, end = start.removesuffix("["), end.lstrip("]\n ")
        return (json_block(start, end, keys=keys, keyed=keyed),)

    @property
    def section(self) -> Section:
        """The markers around calls with names outside the JSON."""
        before, after = self.call.strip().partition("{name}")[::2]
        tag = _FIRST_TOKEN.match(before)
        call = tag[0] if tag else before.partition("{index}")[0]
        between, _, call_end = (part.strip() for part in after.partition("{arguments}"))
        call_end = call_end.removeprefix("```")
        ends = _TOKENS.findall(call_end) if _TOKENS.sub("", call_end) == "" else ()
        return Section(
            _written(self.opening),
            _written(self.closing),
            _written(call),
            tuple(dict.fromkeys((*_written(call_end), *_written(call_end.lstrip(")")), *ends))),
            unmarked=bool(self.opening.strip()),
            between=() if _TOKEN_OR_FENCE.search(between) else _written(between),
        )


@dataclass(frozen=True)
class TagShape:
    """Each argument of a call is in its own tags.

    call: the text before the arguments, with `{name}`.
    call_end: the text after the arguments, perhaps with `{name}`.
    parameter: the text before a value, with `{key}`, and perhaps `{flag}`, for which `flags` has
        one value for text and one for other types.
    value_end: the text after a value, perhaps with `{key}`.
    opening, closing: the text around all calls.
    each: whether it is around every single call.
    breaks: whether line breaks are optional.
    forbidden: texts that no value may contain; by default the tags.
    others: further fields of the reader.
    """

    call: str
    parameter: str
    value_end: str
    call_end: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    each: bool = False
    flags: tuple[str, str] = ("", "")
    breaks: bool = False
    lines: Lines = "kept"
    undeclared: Undeclared = "text"
    forbidden: tuple[str, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tags(self) -> CallTags:
        """The tags for the reader."""
        head, parameter = _HEADER.fullmatch(self.call), _HEADER.fullmatch(self.parameter)
        if not head or not parameter:
            raise ValueError("the shape has no place for a name or a key")
        common: dict[str, Any] = {
            "call": head[1],
            "call_close": self.call_end.strip(),
            "parameter": parameter[1].lstrip(),
            "parameter_close": self.value_end.strip().removeprefix(_CDATA_END),
            "block": self.opening.strip(),
            "block_close": self.closing.strip(),
            "cdata": _CDATA in self.parameter,
            "undeclared": self.undeclared,
            "lines": self.lines,
            **self.others,
        }
        if "<" not in self.parameter:
            return self._keyed(common)
        if not parameter[2] and parameter[1].endswith(">"):
            key_close, sign, value = parameter[4].partition(">")
            common |= {"key_close": f"{key_close}{sign}", "value": value.strip()}
            return KeyValueTags(**common, after_name=head[4].strip())
        # An argument's tags are named by its key if the closing tag contains the key too.
        named = "{key}" in self.value_end
        # Elements of declared arguments and of offered tools are read without these tags.
        if "{name}" in self.call_end:
            common |= {"call": "", "call_close": ""}
        if named and common["parameter"] == "<":
            common |= {"parameter": "", "parameter_close": ""}
        return (ElementTags if named and common["parameter"] else CallTags)(
            **common,
            header_close=head[4].strip(),
            key_header_close=parameter[4].removesuffix(_CDATA).strip(),
            name_key=head[2] or "name",
            parameter_key=parameter[2] or "name",
            text_flag=(parameter[3] or "", self.flags[0]),
        )

    def _keyed(self, common: Mapping[str, Any]) -> KeyedText:
        before, _, after = self.call.partition("{name}")
        call = _OPENER.match(before.lstrip())
        prefix, _, sign = self.parameter.partition("{key}")
        texts = {
            "call": call[0] if call else "",
            "before_name": before.lstrip()[call.end() if call else 0 :].strip(" \n\"'"),
            "after_name": after.strip(" \n\"'"),
            "parameter": prefix.strip(),
            "parameter_close": common["parameter_close"] or "\n",
            "sign": sign.strip(" "),
        }
        return KeyedText(**{**common, **texts})

    @property
    def syntaxes(self) -> tuple[CallSyntax, ...]:
        tags = self.tags
        if "{name}" in self.call_end:
            return (_elements(tags),)
        found = [tagged(tags), *(tags.unopened if isinstance(tags, KeyValueTags) else ())]
        word = tags.call.removeprefix("<")
        if word.isalnum() and f"<{word} {tags.name_key}=" in self.call:  # without its bracket
            opener = (f"{word} {tags.name_key}=",)
            found.append(CallSyntax(opener, tags.read, begins=begins_line, broken=True))
        return tuple(found)

    @property
    def alone(self) -> TagShape:
        """The shape with the text around all calls as a part of each one."""
        return replace(
            self,
            call=self.opening + self.call,
            call_end=self.call_end + self.closing,
            opening="",
            closing="",
            forbidden=self.markup,
        )

    @property
    def markup(self) -> tuple[str, ...]:
        """The texts that no value may contain."""
        tags = self.tags
        found = [tags.call, tags.block, tags.call_close, tags.parameter_close]
        found += [] if isinstance(tags, KeyedText) else [tags.parameter]
        found += [tags.block_close, getattr(tags, "key_close", ""), getattr(tags, "value", "")]
        return self.forbidden or tuple(text.removesuffix(">") for text in found if text)


@dataclass(frozen=True, slots=True)
class PythonShape:
    """`NAME(key=value, …)`; values are JSON that is also a Python literal."""

    opening: str
    separator: str
    closing: str

    @property
    def syntaxes(self) -> tuple[CallSyntax, ...]:
        opening, closing = self.opening.strip().rstrip("["), self.closing.strip().lstrip("]")
        unopened = (_unopened(closing),) if closing else ()
        return (python_block(opening, closing), UNMARKED, *unopened) if opening else (UNMARKED,)


@dataclass(frozen=True, slots=True)
class FencedShape:
    """`call:NAME{key:value,…}` between markers, with raw strings between two equal delimiters."""

    opening: str
    fence: str
    closing: str

    @property
    def syntaxes(self) -> tuple[CallSyntax, ...]:
        marked = fenced_calls(self.opening.strip(), self.fence, self.closing.strip())
        return (marked, replace(marked, openers=("call:",), begins=begins_line))


Shape = JsonShape | TagShape | PythonShape | FencedShape
_KINDS: Mapping[str, Callable[..., Shape]] = {
    kind.__name__: kind for kind in (JsonShape, TagShape, PythonShape, FencedShape)
}


def to_record(shape: Shape) -> dict[str, Any]:
    """Return the shape as JSON, for another process."""
    return {"kind": type(shape).__name__, **asdict(shape)}


def from_record(record: Mapping[str, Any]) -> Shape:
    """Return the shape that `to_record` wrote."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
    }
    return _KINDS[fields.pop("kind")](**fields)


def invoked(prefix: str, block: str, **others: Any) -> TagShape:
    """Return the shape `<invoke name="NAME"><parameter name="KEY">` with a prefix, in one block."""
    flag = ' string="{flag}"' if "flags" in others else ""
    return TagShape(
        **{
            "call": f'<{prefix}invoke name="{{name}}">\n',
            "parameter": f'<{prefix}parameter name="{{key}}"{flag}>',
            "value_end": f"</{prefix}parameter>\n",
            "call_end": f"</{prefix}invoke>\n",
            "opening": f"<{prefix}{block}>\n",
            "closing": f"</{prefix}{block}>",
            **others,
        }
    )


def key_value(prefix: str = "", suffix: str = "", after_name: str = "", **others: Any) -> TagShape:
    """Return the shape `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>` with these affixes."""
    return TagShape(
        **{
            "call": f"<{prefix}tool_call{suffix}>{{name}}{after_name}\n",
            "parameter": f"<{prefix}arg_key{suffix}>{{key}}</{prefix}arg_key{suffix}>\n"
            f"<{prefix}arg_value{suffix}>",
            "value_end": f"</{prefix}arg_value{suffix}>\n",
            "call_end": f"</{prefix}tool_call{suffix}>",
            "separator": "\n",
            "breaks": True,
            **others,
        }
    )
