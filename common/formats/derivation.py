"""Derives how a template writes calls: text that several renderings share is markup."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from common.formats.family import Family
from common.formats.reading import CallSyntax, Tags
from common.formats.shapes import UNMARKED, FencedShape, JsonShape, PythonShape, Shape, TagShape
from common.formats.tool_schema import PAIR_KEYS
from common.prefixes import common_prefix

Made = tuple[str, Mapping[str, Any]]
Render = Callable[[Sequence[Made] | str], str]
"""Renders a conversation whose last message has these calls, or this text; without any, the prompt
of the answer; '' if it cannot be rendered.
"""

NAMES, KEYS, VALUES, NUMBER = ("zyx_wvu", "rqp_ont"), ("place", "until"), ("Tsr qpo", "Mlk jih"), 47
ONE: tuple[Made, ...] = ((NAMES[0], {KEYS[0]: VALUES[0]}),)
TWO: tuple[Made, ...] = (*ONE, (NAMES[1], {KEYS[0]: VALUES[0]}))
_BOTH: tuple[Made, ...] = ((NAMES[0], {KEYS[0]: VALUES[0], KEYS[1]: VALUES[1]}),)
_NUMBER: tuple[Made, ...] = ((NAMES[0], {KEYS[0]: NUMBER}),)
_TEXT = "Kji hgf"
_JSON_OPENS = re.compile(rf'\{{\s*\\?"{KEYS[0]}\\?"\s*:\s*\\?"\Z')
_JSON_CLOSES = re.compile(r'\\?"\s*\}')
_PAIR_OPENS = re.compile(rf'\[\s*(\{{\s*"(\w+)"\s*:\s*)"{KEYS[0]}"(\s*,\s*"value"\s*:\s*)"\Z')
_PAIR_CLOSES = re.compile(r'"(\s*\})\s*\]')
"""The text around a value in an object of arguments, which may be in a JSON string, and in a list
of keys and values.
"""
_ESCAPED = "<&>"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_EMPTY = re.compile(r"\s*<([\w-]+)>\s*</\1>\s*")  # reasoning that the call does not have
_FLAG = re.compile(r'(.* \w+=")(\w+)(".*)', re.DOTALL)


class Calls:
    """What a template writes in place of an answer's text, after any reasoning with these tags."""

    def __init__(self, render: Render, tags: Sequence[Tags] = ()) -> None:
        self._render = render
        self._closings = [each.closing for each in tags]
        self._prompt = render(())
        self._before, _, self._after = render(_TEXT).rpartition(_TEXT)

    def text(self, made: Sequence[Made]) -> str:
        """Return the calls as the template writes them; '' if it does not."""
        return self.parts(made)[1]

    def parts(self, made: Sequence[Made]) -> tuple[str, str]:
        """Return the prompt with which the conversation begins, and the text of the calls after it.

        Both end where a tag does. The calls may have the end of the answer's turn behind them.
        """
        whole = self._render(made)
        start = common_prefix(self._prompt, whole)
        if whole.startswith(self._before):  # the prompt may lack the beginning of the answer's turn
            start = max(start, len(self._before))
        if whole.rfind("<", 0, start) > whole.rfind(">", 0, start):
            start = whole.rfind("<", 0, start)
        end = len(whole) - len(_common_suffix(self._after, whole[start:]))
        if whole.rfind("<", start, end) > whole.rfind(">", start, end):
            end = whole.find(">", end) + 1 or end
        name = max(whole.find(made[0][0], start), start)
        for closing in self._closings:
            place = whole.rfind(closing, start, name)
            start = max(start, place + len(closing) if place >= 0 else 0)
        if (empty := _EMPTY.match(whole, start, end)) and empty[1] not in dict(made):
            start = empty.end()
        text = whole[start:end]
        return whole[:start], text if all(name in text for name, _ in made) else ""


def derived(calls: Calls) -> Family | None:
    """Return the family of a template; None if its calls have none of the known shapes."""
    (before, one), two = calls.parts(ONE), calls.text(TWO)
    first, last = NAMES, VALUES
    if one.find(VALUES[0]) < one.find(NAMES[0]):
        first, last = VALUES[:1] * 2, NAMES
    head, name, rest = one.partition(first[0])
    middle, value, tail = rest.partition(last[0])
    if not name or not value:
        return None
    between = two.partition(last[0])[2].partition(first[1])[0]
    parts = _divided(head, tail, between) if two else _Parts("", head, tail, "", "")
    if first != NAMES:
        found = _arguments_first(middle, parts)
        return family_of(replace(found, several=bool(two))) if found else None
    found = _json(middle, parts)
    shape: Shape | None = replace(found, several=bool(two)) if found else None
    shape = shape or _python(middle, parts) or _fenced(middle, parts) or _tags(calls, parts)
    empty = [each for each in _EMPTY.finditer(before) if each.end() == len(before)]
    tags = tuple(Tags(f"<{each[1]}>", f"</{each[1]}>") for each in empty)
    return None if shape is None else family_of(shape, tags)


def family_of(
    shape: Shape,
    tags: tuple[Tags, ...] = (),
    answers: tuple[str, ...] = (),
    silent: tuple[str, ...] = (),
) -> Family | None:
    """Return a family with this shape; None if nothing distinguishes its calls from text."""
    calls: tuple[CallSyntax, ...] = ()
    if isinstance(shape, JsonShape) and not shape.syntaxes[0].openers[0]:
        if not shape.quoted:
            return None
        calls = (UNMARKED,)
    return Family("derived", shape=shape, tags=tags, calls=calls, answers=answers, silent=silent)


class _Parts(NamedTuple):
    """The texts that a call consists of, besides its name and the text from there to its value.

    before, after: the text of a call up to its name, and after its value.
    opening, closing: the text around all calls.
    """

    opening: str
    before: str
    after: str
    separator: str
    closing: str


def _divided(head: str, tail: str, between: str) -> _Parts:
    """Return what belongs to each call and what to all, by the text between two calls."""
    before = _common_suffix(between, head)
    if 0 <= before.find(">") < before.find("<"):
        before = before[before.find(">") + 1 :]  # the end of another tag
    after = tail[: common_prefix(between[: len(between) - len(before)], tail)]
    if after.rfind("<") > after.rfind(">"):
        after = after[: after.rfind("<")]  # the beginning of another tag
    before = before.lstrip()
    separator = between[len(after) : len(between) - len(before)]
    opening, closing = head[: len(head) - len(before)].lstrip(), tail[len(after) :]
    return _Parts(opening, before, after, separator, closing)


def _arguments_first(middle: str, parts: _Parts) -> JsonShape | None:
    """Return the shape of JSON in which the name is the last member."""
    opening, before, after, separator, closing = parts
    opens, closes = _JSON_OPENS.search(before), _JSON_CLOSES.match(middle)
    if not opens or not closes or not middle.endswith('"') or not after.startswith('"'):
        return None
    between = middle[closes.end() : -1]
    call = f"{before[: opens.start()]}{{arguments}}{between}{{name}}{after[1:]}"
    shape = JsonShape(call, opening, separator, closing)
    return shape if shape.quoted and "{" in before[: opens.start()] else None


def _json(middle: str, parts: _Parts) -> JsonShape | None:
    opening, before, after, separator, closing = parts
    opens, closes, pair = _JSON_OPENS.search(middle), _JSON_CLOSES.match(after + closing), ""
    if not opens and (listed := _PAIR_OPENS.search(middle)) and listed[2] in PAIR_KEYS:
        opens, closes = listed, _PAIR_CLOSES.match(after + closing)
        pair = f"{listed[1]}{{key}}{listed[3]}{{value}}{closes[1] if closes else ''}"
    if not opens or not closes or closes.end() > len(after):
        return None
    between, rest = middle[: opens.start()], after[closes.end() :]
    if NAMES[0] in rest + separator + closing:  # a closing tag with the name
        shape = JsonShape(
            f"{before}{{name}}{between}{{arguments}}{rest.replace(NAMES[0], '{name}')}",
            opening, separator, closing,
        )  # fmt: skip
        return shape if shape.named_element else None
    quoted = before.endswith('"') and between.startswith('"')
    if quoted:
        before, between = before[:-1], between[1:]
    call = f"{before}{{name}}{between}{{arguments}}{rest}"
    shape = JsonShape(call, opening, separator, closing, pair=pair)
    if quoted and not shape.quoted and "<" in before:  # the quotes of an attribute
        call = f'{before}"{{name}}"{between}{{arguments}}{rest}'
        shape = replace(shape, call=call)
        quoted = False
    return shape if shape.quoted == quoted else None


def _python(middle: str, parts: _Parts) -> PythonShape | None:
    quote, (opening, before, after, separator, closing) = middle[-1:], parts
    end = after.removeprefix(f"{quote})")
    if middle != f"({KEYS[0]}={quote}" or end == after:
        return None
    return PythonShape(f"{opening}{before}", f"{end}{separator}{before}", f"{end}{closing}")


def _fenced(middle: str, parts: _Parts) -> FencedShape | None:
    fence = middle.removeprefix(f"{{{KEYS[0]}:")
    end, before = f"{fence}}}", parts.before.removesuffix("call:")
    if parts.opening or parts.separator or not fence or middle == fence or before == parts.before:
        return None
    closing = parts.after.removeprefix(end)
    return None if closing == parts.after else FencedShape(before, fence, closing)


def _tags(calls: Calls, parts: _Parts) -> TagShape | None:
    opening, before, after, separator, closing = parts
    _, _, rest = calls.text(_BOTH).partition(NAMES[0])
    header, key, rest = rest.partition(KEYS[0])
    tag_end, value, rest = rest.partition(VALUES[0])
    value_end, second_key, _ = rest.partition(KEYS[1])
    if not (key and value and second_key and tag_end):
        return None
    shared = _common_suffix(header, value_end)
    place = len(shared[: shared.rfind("<")]) if "<" in shared else shared.rfind("\n") + 1
    tag = shared[len(shared[:place].rstrip(" \t")) :] if place else shared[len(shared.rstrip()) :]
    header, value_end = header[: len(header) - len(tag)], value_end[: len(value_end) - len(tag)]
    if value_end == f"{after}\n" and separator[:1] == closing[:1] == "\n":
        after, separator, closing = value_end, separator[1:], closing[1:]
    if not value_end or not after.startswith(value_end):
        return None
    if KEYS[0] in value_end:  # elements with the names of the arguments
        if (tag.strip(), tag_end.strip().removesuffix(_CDATA)) != ("<", ">"):
            return None
        value_end = value_end.replace(KEYS[0], "{key}")
    call_end, each = after[len(value_end.format(key=KEYS[0])) :], False
    if not opening and "<" in before[1:] and ">" in call_end[:-1]:
        place, end = before.rfind("<"), call_end.find(">") + 1
        end += len(call_end[end:]) - len(call_end[end:].lstrip("\n"))
        opening, before, each = before[:place], before[place:], True
        call_end, closing = call_end[:end], call_end[end:]
    around = _around_values(calls, tag_end, value_end)
    if not around:
        return None
    tag_end, value_end, written = around
    if NAMES[0] in call_end:  # an element with the name of the tool
        call_end = call_end.replace(NAMES[0], "{name}")
        if (before, header[:1], call_end.strip()) != ("<", ">", "</{name}>"):
            return None
    if "<" not in tag:
        if not _is_keyed(f"{opening}{before}", tag, tag_end, value_end, f"{call_end}{closing}"):
            return None
        shown = calls.text(((NAMES[0], {KEYS[0]: _ESCAPED}),))
        written["others"] = {"escaped": True} if shown and _ESCAPED not in shown else {}
    dropped = tag_end.endswith("\n") and value_end.startswith("\n")
    return TagShape(
        call=f"{before}{{name}}{header}",
        parameter=f"{tag}{{key}}{tag_end}",
        value_end=value_end,
        call_end=call_end,
        opening=opening,
        separator=separator,
        closing=closing,
        each=each,
        lines="dropped" if dropped else "paired",
        **written,
    )


def _around_values(calls: Calls, before: str, after: str) -> tuple[str, str, dict[str, Any]] | None:
    """Return the texts around values, and fields of the shape, by how a number is written.

    before, after: the texts around a value that is text.
    """
    number = calls.text(_NUMBER).partition(NAMES[0])[2].partition(KEYS[0])[2]
    found = number.partition(str(NUMBER))[0]
    flag, other = _FLAG.fullmatch(before), _FLAG.fullmatch(found)
    if found == before:
        return before, after, {}
    if before == f"{found}{_CDATA}" and after.startswith(_CDATA_END):  # only text has it
        return found, after[len(_CDATA_END) :], {"others": {"cdata": True}}
    if flag and other:
        return f"{flag[1]}{{flag}}{flag[3]}", after, {"flags": (flag[2], other[2])}
    if f'{found}"' == before and after.startswith('"'):  # all values are JSON
        return found, after[1:], {"undeclared": "json"}
    return None


def _is_keyed(start: str, before: str, sign: str, value_end: str, end: str) -> bool:
    """Return whether these texts around keys and values without tags can only be a call.

    start, end: the texts around the whole call.
    """
    marked = start.lstrip()[:1] in ("<", "[") and end.strip()[:1] in ("<", "[", "/", ">")
    signed = sign.strip() in (":", "=", '="', "='", ":=")
    return bool(marked and signed and value_end in ("\n", '"', "'") and before.strip() in ("", "-"))


def _common_suffix(one: str, other: str) -> str:
    return one[len(one) - common_prefix(one[::-1], other[::-1]) :]
