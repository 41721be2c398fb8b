"""What comes from the description of a family: its parser, its signs and its row in the docs.

`scripts/python -m tests.common.test_families` writes the rows into docs/formats.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_format import ChatFormat
from common.formats.families import FAMILIES, tool_parser
from common.formats.family import Family
from common.formats.shapes import FencedShape, JsonShape, PythonShape, Shape, TagShape
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import tool

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"
HEADER = "| family | `tool_parser` | `reasoning_parser` | calls | reasoning | recognised by |\n"
NAMES = st.sampled_from(["ferry_times", "tide_now"])
TEXT = st.text("abc é😀,.'\"\\", max_size=8).map(str.strip)
ARGUMENTS = st.fixed_dictionaries({"harbour": TEXT, "berths": st.integers(-9, 99)})
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
TOOLS = [tool(name, harbour="string", berths="integer") for name in ("ferry_times", "tide_now")]
WITH_CALLS = [family for family in FAMILIES if family.shape]


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _dumps(value)


def written(shape: Shape, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as the family writes them."""
    if isinstance(shape, JsonShape):
        found = [
            shape.call.replace("{name}", _dumps(name) if shape.quoted else name)
            .replace("{index}", str(index))
            .replace("{arguments}", _dumps(arguments))
            for index, (name, arguments) in enumerate(calls)
        ]
    elif isinstance(shape, TagShape):
        found = [_tagged(shape, name, arguments) for name, arguments in calls]
    elif isinstance(shape, PythonShape):
        found = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
    else:
        return "".join(
            f"{shape.opening}call:{name}{{{','.join(_fenced(shape, arguments))}}}{shape.closing}"
            for name, arguments in calls
        )
    whole = shape.separator.join(found)
    each = isinstance(shape, TagShape) and shape.each
    return whole if each else f"{shape.opening}{whole}{shape.closing}"


def _tagged(shape: TagShape, name: str, arguments: dict[str, Any]) -> str:
    inside = "".join(
        shape.parameter.replace("{flag}", shape.flags[not isinstance(value, str)]).replace(
            "{key}", key
        )
        + _bare(value)
        + shape.value_end.replace("{key}", key)
        for key, value in arguments.items()
    )
    call = shape.call.replace("{name}", name) + inside + shape.call_end
    return f"{shape.opening}{call}{shape.closing}" if shape.each else call


def _fenced(shape: FencedShape, arguments: dict[str, Any]) -> list[str]:
    return [
        f"{key}:{shape.fence}{value}{shape.fence}" if isinstance(value, str) else f"{key}:{value}"
        for key, value in arguments.items()
    ]


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.title)
@given(calls=CALLS)
@settings(max_examples=12)
def test_a_family_s_parser_reads_what_its_shape_writes(
    family: Family, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    format_ = ChatFormat.named(family.names.split()[0])
    tail = ">>>" if family.title == "Functionary 3.2" else ""
    for shape in (family.shape, family.by_token and family.by_token[1]):
        if shape:
            several = not isinstance(shape, JsonShape) or shape.several
            made = calls if several else calls[:1]
            text = written(shape, made)
            message = parse_every_split(format_, text, tools=TOOLS, tail=tail, count=1)
            assert plain(message) == ("", "", made)


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.title)
def test_a_family_is_recognised_by_each_set_of_its_signs(family: Family) -> None:
    for signs in family.signs:
        assert tool_parser(" ".join(signs), ()) == family.names.split()[0]
        assert tool_parser("", signs) == family.names.split()[0]


def test_no_name_and_no_set_of_signs_is_given_twice() -> None:
    names = " ".join(family.names for family in FAMILIES).split()
    assert len(set(names)) == len(names)
    names = " ".join(family.reasoning for family in FAMILIES).split()
    assert len(set(names)) == len(names)
    signs = [frozenset(signs) for family in FAMILIES for signs in family.signs]
    assert len(set(signs)) == len(signs)


def _code(text: str) -> str:
    text = text.replace("\n", " ").replace("|", "\\|")
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " * bool(longest)
    return f"{fence}{space}{text}{space}{fence}"


def row(family: Family) -> str:
    """A family's row of the table in docs/formats.md."""
    shapes = [family.shape, family.by_token and family.by_token[1]]
    calls = " or ".join(_code(_example(shape)) for shape in shapes if shape)
    tags = family.grammar.tags if family.shape or family.reasoning else ()
    thinking = ", ".join(_code(f"{tags.opening}…{tags.closing}") for tags in tags)
    signs = " or ".join(" and ".join(map(_code, signs)) for signs in family.signs)
    names = (", ".join(map(_code, each.split())) for each in (family.names, family.reasoning))
    return f"| {' | '.join([family.title, *names, calls, thinking, signs])} |\n"


def _example(shape: Shape) -> str:
    if isinstance(shape, JsonShape):
        name = '"NAME"' if shape.quoted else "NAME"
        call = shape.call.replace("{name}", name).replace("{arguments}", "{…}")
        return shape.opening + call.replace("{index}", "0") + shape.closing
    if isinstance(shape, TagShape):
        argument = shape.parameter.replace("{key}", "KEY").replace("{flag}", shape.flags[0])
        argument += "…" + shape.value_end.replace("{key}", "KEY")
        call = shape.call.replace("{name}", "NAME") + argument + shape.call_end
        return shape.opening + call + shape.closing
    inside = "NAME(KEY='…')"
    if isinstance(shape, FencedShape):
        inside = f"call:NAME{{KEY:{shape.fence}…{shape.fence}}}"
    return shape.opening + inside + shape.closing


def documented() -> str:
    """The whole table."""
    return HEADER + "|---" * 6 + "|\n" + "".join(map(row, FAMILIES))


def test_the_documentation_has_every_family_s_row() -> None:
    assert documented() in DOCS.read_text(encoding="utf-8"), (
        "run scripts/python -m tests.common.test_families"
    )


def _write() -> None:
    text = DOCS.read_text(encoding="utf-8")
    table = re.search(r"\| family \|.*?\n\n", text, re.DOTALL)
    assert table
    DOCS.write_text(text.replace(table[0], documented() + "\n"), encoding="utf-8")


if __name__ == "__main__":
    _write()
