"""Calls with each argument in its own tags, as in `<parameter=city>Paris</parameter>`.

A value is raw text and may contain anything, even the family's own tags. A closing tag ends the
value only if valid syntax follows it; complete calls quoted inside the value are skipped by
counting them. A missing closing tag is tolerated if the next element can only follow it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from common.formats.answer import Call
from common.formats.cursor import SPACE, Cursor, Cut, T, Unreadable, Wait, markers_of
from common.formats.json_calls import at_plain_calls, read_arguments, read_json_calls
from common.formats.pythonic import read_parenthesis
from common.formats.reading import Reading
from common.formats.tag_spelling import (
    attributes_of,
    closings,
    openings,
    respelt,
    spellings,
)
from common.formats.tool_schema import Undeclared
from common.formats.value_sender import LAST_BREAK, Lines, QuotedMarkup, ValueSender
from common.formats.values import Pairs, object_of

_HEADER_RUN, _NAME_RUN = re.compile(r"[^<>\n]*"), re.compile(r"[^<>\n{(]*")
_ATTRIBUTES = re.compile(r'(?:\s+[\w-]+="[^"]*")++(?![\s>])')
"""The beginning of a header whose end is damaged, with text behind it."""
_WORD, _TEXT = re.compile(r"[\w:.|｜-]+"), re.compile(r"[^<>]*")
_NAME_WORDS = frozenset({"name", "tool_name", "function_name", "function", "tool"})
_STRAY = ("tool_call", "tool_calls", "function_calls", "function_call", "tool_response", "invoke")
_STRAY_CLOSINGS = tuple(
    f"</{word}>" for word in (*_STRAY, "function", "function_invocation", "parameter", "tools")
)
"""What models write behind a call instead of the closing tag of its block, or before that tag."""
NAME_TAG = "<tool_name>"
"""What GLM-5 writes around a name, perhaps instead of the tag of a call."""
AROUND_ARGUMENTS = tuple(
    f"<{end}{word}>"
    for word in ("parameters", "arguments", "tool_args", "tool_arguments", "tool_input")
    for end in ("", "/")
)
_CDATA_OPEN, _CDATA_CLOSE = "<![CDATA[", "]]>"


class Tag(NamedTuple):
    """An opening tag with the name of a tool or an argument in it.

    closed: whether the tag is self-closing.
    close: its closing tag, if it is not one of the family's own tags.
    length: the number of its characters, if it was not read.
    """

    name: str = ""
    closed: bool = False
    attributes: Mapping[str, str] = {}
    close: str = ""
    length: int = 0


@dataclass(frozen=True)
class CallTags:
    """The tags of a family. Opening tags are given up to the header with the name."""

    call: str
    call_close: str
    parameter: str
    parameter_close: str
    header_close: str = ">"
    """The end of a call's header; '' if its name ends with a line or before a tag."""
    key_header_close: str = ">"
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
    outer_close: str = ""
    """What may close the call instead of its own tag, if that is another family's."""

    @cached_property
    def _calls(self) -> tuple[str, ...]:
        return spellings(self.call)

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        """The beginning of a parameter's tag, also without its first bracket."""
        return tuple(dict.fromkeys((*spellings(self.parameter), *openings(self.parameter))))

    @property
    def _bare_call(self) -> str:
        """The beginning of a call whose first bracket is missing: its tool must be offered."""
        return self.call[1:] if self.call.startswith("<") else ""

    @cached_property
    def _call_ends(self) -> tuple[str, ...]:
        found = (*self._end_forms(self.call_close), *respelt(self.call_close), self.outer_close)
        return tuple(form for form in found if form not in (*self._calls, self.block))

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The closing tag of a parameter, also without its brackets."""
        return self._end_forms(self.parameter_close)

    def _end_forms(self, closing: str) -> tuple[str, ...]:
        """Return a closing tag and its forms; without brackets if the call opens without them."""
        bare = closing.startswith("</") and not self.call.endswith(">")
        return (*openings(closing), *([closing[2:]] if bare else []))

    @cached_property
    def _closing(self) -> Mapping[str, str]:
        """The closing tags of tags that may be quoted in a value."""
        return {
            self.block: self.block_close,
            **dict.fromkeys(self._calls, self.call_close),
            **dict.fromkeys(spellings(self.parameter), self.parameter_close),
        }

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block, *self._calls[:2])))

    @property
    def closers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.block_close, self.call_close)))

    def read(self, reading: Reading) -> Wait[None]:
        """Read a block of calls, or calls without the block's tags."""
        opens_call = reading.opener.startswith((*self._calls, *openings(self.call)))
        respelt_block = "" if opens_call else reading.opener
        in_block = bool((yield from reading.accept(*openings(self.block), respelt_block)))
        in_block = in_block or not (self.block or self.call)  # elements with the names of tools
        ends = tuple(f for f in closings(self.block_close) if f.endswith((">", "]")))
        strays = [tag for tag in _STRAY_CLOSINGS if tag != self.block_close]
        count = 0
        while True:
            if in_block or count:
                space = yield from self._space_before_call(reading)
                if space is None:
                    break
                reading.take(space)
            if in_block and (yield from at_plain_calls(reading)):
                yield from read_json_calls(reading, (*ends, *_STRAY_CLOSINGS))
            else:
                yield from self._read_calls(reading, in_block)
            count += 1
            while (yield from reading.accept_after_space(*strays)):
                pass
        yield from reading.accept_after_space(*ends)
        if not count:
            raise reading.unreadable()

    def _tag(self, reading: Reading, key: str, known: Callable[[str], bool]) -> Wait[Tag]:
        """Return the next tag, unread; its name is its only attribute or its word if it is known.

        key: the key of an attribute without one.
        """
        found = yield from reading.follow("<", _WORD, _HEADER_RUN, ">")
        if self.header_close != ">" or not found:
            return Tag()
        word, attributes = found[1], attributes_of(found[2].rstrip("/"), key)
        name = next((each for each in (attributes.get(key, ""), word) if known(each)), "")
        closed = (word + found[2]).endswith("/")
        return Tag(name, closed, attributes, f"</{word}>", sum(map(len, found)))

    def _element(self, reading: Reading, *, outer: bool = True) -> Wait[Tag]:
        """Return the next tag if its word, its only attribute or its text is an offered tool's.

        outer: whether the name may also be in an element inside it.
        """

        def known(name: str) -> bool:
            return reading.tools.meant(name) in reading.tools

        tag = yield from self._tag(reading, self.name_key, known)
        if tag.attributes or tag.closed or tag.close[2:-1] not in _NAME_WORDS:
            return tag
        start = reading.position
        with reading.ahead():
            reading.take(tag.length)
            yield from reading.space()
            inner = (yield from self._element(reading, outer=False)) if outer else Tag()
            reading.take(inner.length if inner.name else 0)
            if not inner.name:
                name = (yield from reading.run(_TEXT)).strip()
                closed = yield from reading.accept(tag.close)
                # The name's closing tag does not close the call.
                close = "" if closed else tag.close
                inner = Tag(name if known(name) else tag.name, close=close)
            return inner._replace(length=reading.position - start)

    def _space_before_call(self, reading: Reading) -> Wait[int | None]:
        """Return the length of the space before the next call of the block; None if there is none.

        Calls that are objects may have a comma between them.
        """
        start = reading.position
        with reading.ahead():
            yield from reading.space()
            if "<tool_call>" not in self._calls:  # it may be there too often
                yield from reading.accept_all("<tool_call>", SPACE)
            if not (yield from reading.at([*self._calls, self._bare_call])):
                comma = yield from reading.accept_all(",", SPACE)
                if comma and not (yield from reading.more()) and reading.was_cut():
                    raise Cut
                if self.block_close and (yield from reading.at([self.block_close])):
                    return None
                plain = yield from at_plain_calls(reading)
                plain = plain or bool((yield from self._untagged_name(reading)))
                if not plain and not (yield from self._element(reading)).name:
                    return None
            return reading.position - start

    def _read_call_header(self, reading: Reading, begun: str) -> Wait[Tag]:
        """Read the rest of a call's tag, of which `begun` was read."""
        header, closed = yield from self._read_header(reading, begun, self.call)
        attributes = attributes_of(header, self.name_key)
        name = attributes.get(self.name_key, header.strip() if self.call.endswith(">") else "")
        single = len(name.split()) == 1 or self.name_key in header
        return Tag(name if single else "", closed, attributes)

    def _read_parameter_header(self, reading: Reading, begun: str) -> Wait[Tag]:
        """Read the rest of a parameter's tag, of which `begun` was read."""
        header, closed = yield from self._read_header(reading, begun, self.parameter)
        attributes = attributes_of(header, self.parameter_key)
        if self.parameter_key not in attributes:
            raise reading.unreadable()
        return Tag(attributes[self.parameter_key], closed, attributes)

    def _read_header(self, cursor: Cursor, begun: str, tag: str) -> Wait[tuple[str, bool]]:
        """Return the header of a tag whose beginning was read, and whether it is self-closing."""
        stem = tag.removesuffix("=")
        text = [begun[len(stem) :] if begun.startswith(stem) else tag[len(stem) :]]
        close = self.key_header_close if tag == self.parameter else self.header_close
        place = cursor.save()
        try:
            named = tag.endswith(("=", ">"))
            text.append((yield from cursor.run(_NAME_RUN if named else _HEADER_RUN)))
            header = "".join(text)
            ends = yield from cursor.accept(close)
            # The `>` of a tag such as `<function=NAME>` may be missing before these.
            if close == ">" and (yield from cursor.peek()) in ("\n", "<", "{", "("):
                ends = close
            whole = _ATTRIBUTES.match(header)
            if close and whole and not (ends and attributes_of(header.rstrip("/"), "name")):
                cursor.restore(place)
                cursor.take(whole.end() - len(text[0]))
                ends = yield from cursor.accept(*openings(close))
                if not ends and (yield from cursor.peek()) == "<":
                    raise cursor.unreadable()
                return whole[0], False
        finally:
            cursor.release()
        if close and not ends:
            raise cursor.unreadable()
        return header.rstrip("/"), header.endswith("/")

    def _read_calls(self, reading: Reading, in_block: bool) -> Wait[None]:
        element = (yield from self._element(reading)) if in_block else Tag()
        named = (yield from self._untagged_name(reading)) if in_block else ""
        if named:
            reading.take(len(named))
            reading.call((yield from self.read_body(reading, Tag(named))))
        elif element.name and not (yield from reading.at(self._calls)):
            reading.call((yield from self._read_element(reading, element)))
        else:
            reading.call((yield from self.read_call(reading)))

    def _untagged_name(self, reading: Reading) -> Wait[str]:
        """Return the name of an offered tool before a parameter's tag; '' if none comes next."""
        found = yield from reading.follow(_WORD, SPACE, self._parameters)
        return found[0] if found and reading.tools.meant(found[0]) in reading.tools else ""

    def _read_element(self, reading: Reading, element: Tag) -> Wait[Call]:
        """Read a call that begins with a tag of another family."""
        reading.take(element.length)
        lines = "paired" if self.lines == "kept" else self.lines
        outer = self.call_close if element.close else ""
        close = element.close or self.call_close
        tags = replace(self, call_close=close, lines=lines, outer_close=outer)
        return (yield from tags.read_body(reading, element))

    def read_call(self, reading: Reading) -> Wait[Call]:
        begun = yield from reading.expect(*self._calls, self._bare_call)
        if begun != self._bare_call:
            return (yield from self.read_inside(reading, begun))
        tag = yield from self._read_call_header(reading, self.call)
        if reading.tools.meant(tag.name) not in reading.tools:
            raise Unreadable
        return (yield from self.read_body(reading, tag))

    def read_inside(self, reading: Reading, begun: str) -> Wait[Call]:
        """Read a call from its name on."""
        tag = yield from self._read_call_header(reading, begun)
        if not tag.name:
            raise reading.unreadable()
        return (yield from self.read_body(reading, tag))

    def read_body(self, reading: Reading, tag: Tag) -> Wait[Call]:
        """Read a call from its arguments on."""
        name, identity = reading.tools.meant(tag.name), tag.attributes.get("id", "")
        arguments: list[tuple[str, str]] = []
        close = ""
        reading.begin(name, identity)
        while not tag.closed:
            yield from self._gap(reading)
            if (yield from self._accept_close(reading)):
                break
            parameter = yield from self._read_parameter_tag(reading, name, arguments, close)
            if parameter:
                close = parameter.close
                yield from self._read_parameter(reading, name, arguments, parameter)
            elif not arguments and (yield from reading.accept("(")):
                given = yield from read_parenthesis(reading, name, (self.call_close,))
                yield from reading.accept(">")
                yield from reading.accept_after_space(*self._call_ends)
                return Call(name, given, identity)
            elif (yield from reading.at([self.json_block])) or (
                not arguments and (yield from reading.at(["{", '"', "```"]))
            ):
                return Call(name, (yield from self._read_json(reading)), identity)
            elif not arguments and (yield from self._repeats_header(reading, name)):
                continue
            elif (yield from self._left_open(reading, name, arguments)):
                break
            else:
                raise reading.unreadable()
        return Call(name, object_of(arguments), identity)

    def _read_parameter_tag(
        self, reading: Reading, name: str, arguments: Pairs, close: str
    ) -> Wait[Tag | None]:
        """Read the next tag if it is a parameter's, also in another form.

        close: the closing tag of the parameter before it, if that had another form.
        """
        if not (begun := (yield from self._opens_parameter(reading))):
            given = {key for key, _ in arguments}
            tag = yield from self._foreign_parameter(reading, name, given, close)
            reading.take(tag.length if tag.name else 0)
            return tag if tag.name else None
        tag = yield from self._read_parameter_header(reading, begun)
        again = yield from reading.at(self._parameters)
        if again and (yield from self._next_key(reading)) == tag.name:  # the tag was written twice
            reading.take(len(again))
            yield from self._read_parameter_header(reading, again)
        return tag

    def _foreign_parameter(
        self, reading: Reading, name: str, given: Set[str], close: str
    ) -> Wait[Tag]:
        """Return the next tag, unread; it has a name if it is that of a declared argument.

        Any name counts in a tag like that of the parameter before it, which ended with `close`.
        """
        expected = set(reading.tools.properties(name)) - given
        tag = yield from self._tag(reading, self.parameter_key, expected.__contains__)
        if not tag.name and tag.close == close:
            key = tag.attributes.get(self.parameter_key, "")
            return tag._replace(name="" if key in given else key)
        return tag

    def _accept_close(self, cursor: Cursor) -> Wait[bool]:
        """Read a call's closing tag, of which a bracket may be missing; returns whether it came."""
        found = yield from cursor.at(self._call_ends)
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
        while (yield from cursor.accept(*AROUND_ARGUMENTS)):
            yield from cursor.space()

    def _opens_parameter(self, cursor: Cursor) -> Wait[str]:
        """Read the beginning of a parameter's tag; returns it, or '' if none comes next."""
        return (yield from cursor.accept(*self._parameters))

    def _repeats_header(self, reading: Reading, name: str) -> Wait[bool]:
        """Read the beginning of the call if the model wrote it twice; returns whether it did."""
        with reading.ahead() as keep:
            begun = yield from reading.accept(*self._calls)
            again = (yield from self._read_call_header(reading, begun)).name if begun else ""
            if repeated := bool(begun) and reading.tools.meant(again) == name:
                keep()
        return repeated

    def _left_open(self, reading: Reading, name: str, arguments: Pairs) -> Wait[bool]:
        """Return whether the next text shows that the call has ended without its closing tag.

        At the end of the text, a call without a required argument counts as truncated.
        """
        if not (yield from reading.more()):
            tools = reading.tools
            own_line = reading.answer.markdown.line_start
            begun = arguments or (name in tools and (own_line or not tools.properties(name)))
            if reading.was_cut() or not begun or tools.lacks(name, (key for key, _ in arguments)):
                raise Cut
            return True
        following = filter(None, (*respelt(self.block_close), self.block, *self._calls, NAME_TAG))
        return bool((yield from reading.at(following)))

    def _read_json(self, reading: Reading) -> Wait[str]:
        """Read arguments that are one JSON object, up to the end of the call."""
        if self.json_block and (yield from reading.accept(self.json_block)):
            yield from self._read_header(reading, "", self.json_block)
        ends = tuple(filter(None, (self.json_close, self.call_close)))
        text = yield from read_arguments(reading, ends)
        half = self.call_close.removesuffix(">")
        closings = (self.json_close,), AROUND_ARGUMENTS, self._ends
        for closing in (*closings, (half, *respelt(self.call_close))):  # a stray one too
            yield from reading.accept_after_space(*closing)
        return text

    def _read_parameter(
        self, reading: Reading, name: str, arguments: list[tuple[str, str]], tag: Tag
    ) -> Wait[None]:
        """Read a parameter from behind its tag."""
        flag = tag.attributes.get(self.text_flag[0])
        is_text = None if flag is None else flag == self.text_flag[1]
        is_text = False if self.undeclared == "json" else is_text
        value = ValueSender(reading, name, tag.name, arguments, is_text)
        value.undeclared, value.lines = self.undeclared, self.lines
        value.ends = (tag.close,) if tag.close else (*self._ends, f"</{tag.name}>")
        written = value.typed("") if tag.closed else (yield from self._read_value(reading, value))
        arguments.append((tag.name, written))
        value.whole(written)

    def _read_value(self, reading: Reading, value: ValueSender) -> Wait[str]:
        """Read a value and its closing tag; returns it as JSON."""
        return value.typed((yield from self._read_text(reading, value)))

    def _read_text(self, reading: Reading, value: ValueSender) -> Wait[str]:
        """Read a value to its end; quoted calls are skipped, unless no end would remain.

        Where the length limit cuts a value after a quoted call, the end is missing.
        """
        place = reading.save()
        try:
            if self.cdata and (yield from _opens_section(reading)):
                value.lines = "kept"
                return (yield from self._scan_section(reading, value))
            return (yield from self._scan_text(reading, value))
        except Cut:
            value.restart()
            if reading.was_cut():
                raise
            reading.restore(place)
            yield from _opens_section(reading)
            return (yield from self._scan_text(reading, value, skips_calls=False))
        finally:
            reading.release()

    def _scan_section(self, cursor: Cursor, value: ValueSender) -> Wait[str]:
        """Read the rest of a CDATA section, and the end of the value after it."""
        ends_of_section = markers_of(_CDATA_CLOSE, self.parameter_close)
        while True:
            marker = yield from cursor.inside(ends_of_section, value.add)
            with cursor.ahead():
                cursor.take(len(marker))
                yield from cursor.space()
                ends = (yield from cursor.at(value.ends)) or not (yield from cursor.more())
            if marker == _CDATA_CLOSE and ends:
                cursor.take(len(marker))
                yield from cursor.accept_after_space(*value.ends)
                return value.text
            if marker != _CDATA_CLOSE:
                value.stop()  # the end of the section may be missing
            value.add(cursor.take(len(marker)))

    def _scan_text(
        self, reading: Reading, value: ValueSender, *, skips_calls: bool = True
    ) -> Wait[str]:
        closing = self._closing
        tags = markers_of(*closing, *closing.values(), *self._ends, *value.ends)
        value.quoted = QuotedMarkup()
        while True:
            marker = yield from reading.inside(tags, value.add)
            if value.quoted.close(marker):
                pass
            elif skips_calls and (yield from self._begins_quote(reading, marker, value)):
                value.quoted.open(self._closing[marker])
                value.quotes = True
                value.stop()
            elif (yield from self._ends_text(reading, marker, value)):
                if skips_calls and value.quotes and marker not in value.ends:
                    raise Cut  # the value's own closing tag was taken for one of the quoted call
                if reading.take(len(marker) if marker in value.ends else 0):
                    reading.take((yield from _repeated_name(reading)))
                    return value.text
                return value.text if self.lines == "dropped" else LAST_BREAK.sub("", value.text)
            value.add(reading.take(len(marker)))

    def _begins_quote(self, reading: Reading, marker: str, value: ValueSender) -> Wait[bool]:
        """Return whether a tag inside a value opens a quoted block, call or parameter.

        Raises Cut if the length limit leaves that open.
        """
        if marker in self._parameters:
            return bool(value.quoted) and (yield from self._next_key(reading)) is not None
        if marker != self.block and marker not in self._calls:
            return False
        with reading.ahead():
            if marker == self.block:
                reading.take(len(marker))
                yield from reading.space()
                if not (yield from self._follows(reading, self._calls)):
                    return False
            begun = yield from reading.accept(*self._calls)
            if (yield from _tried(reading, self._read_call_header(reading, begun))) is None:
                return False
            yield from reading.space()
            following = (*self._parameters, self.call_close)
            return bool((yield from self._follows(reading, following)))

    def _next_key(self, reading: Reading) -> Wait[str | None]:
        """Return the key of the parameter whose tag comes next; None if its header is not readable.

        Raises Cut if the length limit leaves that open.
        """
        with reading.ahead():
            if not (begun := (yield from self._opens_parameter(reading))):
                return None
            header = yield from _tried(reading, self._read_parameter_header(reading, begun))
            return header.name if header else None

    def _follows(self, reading: Reading, literals: Sequence[str]) -> Wait[str]:
        """Return the literal that comes next; raises Cut if the length limit leaves that open."""
        found = yield from reading.at(literals)
        if not found and reading.was_cut():
            with reading.ahead():
                rest = reading.rest()
            if any(literal.startswith(rest) for literal in literals):
                raise Cut
        return found

    def _ends_text(self, reading: Reading, marker: str, value: ValueSender) -> Wait[bool]:
        """Return whether the text after a closing tag shows that the tag ends the value.

        Raises Cut if the length limit leaves that open.
        """
        if marker in self._parameters:
            key = yield from self._next_key(reading)
            return key in value.declared and key not in value.given
        if marker == self.block or marker in self._calls:
            return False
        with reading.ahead():
            reading.take(len(marker))
            reading.take((yield from _repeated_name(reading)))
            yield from self._gap(reading)
            ends = marker not in value.ends and not value.quotes
            if not (yield from reading.more()) and (ends or not reading.was_cut()):
                return True
            following = [self.block]
            if marker in value.ends or marker == self.call_close:
                following += [self.block_close, *self._calls, NAME_TAG]
            if marker in value.ends:
                following += [*self._call_ends, *self._parameters]
            found = yield from self._follows(reading, list(filter(None, following)))
            if found and found not in self._parameters:
                return True
            if marker in value.ends and not found:
                tag = yield from self._foreign_parameter(reading, value.tool, value.given, marker)
                if tag.name:
                    return True
            key = (yield from self._next_key(reading)) if found or marker in value.ends else None
            if not found:  # the beginning of the next key's tag may be missing
                return key in value.declared and key not in value.given
            # A repeated key is a model's mistake, or belongs to a quoted call.
            return key is not None and not (value.quotes and key in value.given)


def _tried(reading: Reading, read: Wait[T]) -> Wait[T | None]:
    """Return what was read; None if it is not readable.

    Raises Cut if the length limit leaves that open.
    """
    try:
        return (yield from read)
    except Unreadable as error:
        if isinstance(error, Cut) and reading.was_cut():
            raise
        return None


def _repeated_name(cursor: Cursor) -> Wait[int]:
    """Return the length of the rest of a closing tag that repeats a name, as `</parameter=KEY>`."""
    return sum(map(len, (yield from cursor.follow("=", _NAME_RUN, ">"))))


def _opens_section(cursor: Cursor) -> Wait[bool]:
    """Read the beginning of a CDATA section if one comes next; returns whether it did."""
    position = cursor.position
    yield from cursor.accept_after_space(_CDATA_OPEN)
    yield from cursor.drop_cut((_CDATA_OPEN,))
    return cursor.position > position
