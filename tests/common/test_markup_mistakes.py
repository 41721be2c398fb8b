"""Calls of every family with the same small mistakes in their markup."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from common.chat_format import ChatFormat
from common.formats.family import Family
from common.formats.shapes import FencedShape, JsonShape, PythonShape, Shape
from tests.common.chat_replay import parse_every_split, plain
from tests.common.test_families import TOOLS, WITH_CALLS, written

CALLS = [("ferry_times", {"harbour": "Ærø", "berths": 4}), ("tide_now", {})]
MARK = re.compile(r"<[^<>\n]*>|\[[A-Z_]+\]|\]<\]minimax\[>\[")
NAME = re.compile(r"ferry_times|tide_now")


def _before_names(prefix: str) -> Callable[[str], str]:
    return lambda text: NAME.sub(lambda name: prefix + name[0], text)


def _after_first(space: str) -> Callable[[str], str]:
    return lambda text: MARK.sub(lambda mark: mark[0] + space, text, count=1)


def _after_all(space: str) -> Callable[[str], str]:
    return lambda text: MARK.sub(lambda mark: mark[0] + space, text)


def _before_all(space: str) -> Callable[[str], str]:
    return lambda text: MARK.sub(lambda mark: space + mark[0], text)


def _with_first_token(form: str) -> Callable[[str], str]:
    return lambda text: re.sub(r"^<([|｜])([^<>]*)([|｜])>", form, text)


def _without_the_last(text: str) -> str:
    last = [mark for mark in MARK.finditer(text) if mark.end() == len(text)]
    return text[: last[0].start()] if last else text


MISTAKES: dict[str, Callable[[str], str]] = {
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "a space after the first marker": _after_first(" "),
    "a line break after the first marker": _after_first("\n"),
    "a space after every marker": _after_all(" "),
    "a line break after every marker": _after_all("\n"),
    "a space before every marker": _before_all(" "),
    "a line break before every marker": _before_all("\n"),
    "no last marker": _without_the_last,
    "functions:": _before_names("functions:"),
    "default_api:": _before_names("default_api:"),
    "google:mcp:": _before_names("google:mcp:"),
    "mcp__harbour__": _before_names("mcp__harbour__"),
    "no first bracket": lambda text: text[text.startswith("<") :],
    "no last bracket": lambda text: text.removesuffix(">"),
    "a wrong last bracket": lambda text: (
        f"{text[:-2]}>" if text.endswith("|>") else re.sub(">$", "|>", text)
    ),
}
MISTAKES |= {
    f"the first token as {form}": _with_first_token(form)
    for form in (r"<\1\2", r"<\1\2\3", r"<\1\2>", r"\2\3>", r"<\2\3>", r"\1\2\3>")
}
UNREADABLE = {
    "Muse Glimmer": ("a space after every marker", "a line break after every marker"),
}
"""Mistakes after which a part of the markup is shown as text, or the call is."""


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.title)
def test_calls_are_read_despite_a_mistake(family: Family, mistake: str) -> None:
    if mistake in UNREADABLE.get(family.title, ()):
        pytest.skip("not readable")
    format_ = ChatFormat.named(family.names.split()[0])
    tail = ">>>" if family.title == "Functionary 3.2" else ""
    for shape in (family.shape, family.by_token and family.by_token[1]):
        for count in (1, 2) if shape else ():
            assert shape
            several = not isinstance(shape, JsonShape) or shape.several
            made = CALLS[: count if several else 1]
            text = MISTAKES[mistake](written(shape, made).rstrip())
            message = parse_every_split(format_, text, tools=TOOLS, tail=tail, count=1)
            calls = [(name, _stripped(given)) for name, given in plain(message)[2]]
            assert (message.content.strip(), calls) == ("", made), text


def _stripped(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments without the space that a mistake has put into their values."""
    return {
        key: value.strip() if isinstance(value, str) else value for key, value in arguments.items()
    }


UNQUOTED = ("Functionary 3.2",)
"""Families whose calls have no marker before the name."""


def _single(text: str) -> str:
    return text.replace('"', "'")


def _backticks(text: str) -> str:
    return re.sub(r"(?<=[\w>\]])`?(ferry_times|tide_now)`?", r"`\1`", text)


def _double(text: str) -> str:
    return re.sub(r'"?(ferry_times|tide_now)"?', r'"\1"', text)


@pytest.mark.parametrize(
    "quotes", [_single, _backticks, _double], ids=["single", "backticks", "double"]
)
@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.title)
def test_other_quotation_marks_are_read(family: Family, quotes: Callable[[str], str]) -> None:
    format_ = ChatFormat.named(family.names.split()[0])
    tail = ">>>" if family.title == "Functionary 3.2" else ""
    shape: Shape | None = family.shape
    if isinstance(shape, PythonShape | FencedShape) or not shape or family.title in UNQUOTED:
        return
    text = quotes(written(shape, CALLS[:1]))
    message = parse_every_split(format_, text, tools=TOOLS, tail=tail, count=1)
    assert plain(message) == ("", "", CALLS[:1]), text


_DAMAGED_TOKEN = re.compile(r"<(/?[|｜])([^<>]*)([|｜])>")


def _damaged(mark: str) -> dict[str, str]:
    """The mark without each of its brackets, and without all of it."""
    found = {"lost": "", "no first bracket": mark[1:], "no last bracket": mark[:-1]}
    if _DAMAGED_TOKEN.fullmatch(mark):
        found |= {"no |>": mark[:-2], "no last |": f"{mark[:-2]}>"}
        found |= {"no <|": mark[2:], "no first |": f"<{mark[2:]}"}
    return found


MISREAD: dict[str, set[tuple[int, str]]] = {
    "Qwen3-Coder, Qwen3.5 and later": {(4, "lost")},
    "DeepSeek V3": {(2, "no |>")},
    "DeepSeek V3.1": {(1, "no |>"), (2, "no <|")},
    "DeepSeek V3.2": {(4, "lost")},
    "DeepSeek V4": {(4, "lost")},
    "DeepSeek V4.1": {(4, "lost")},
    "GigaChat 3.5": {(4, "lost")},
    "Step 3": {(6, "lost")},
    "Hunyuan 3": {(1, "no last bracket")},
    "Hunyuan 4": {(1, "no last bracket")},
    "Solar Open 2": {(5, "lost")},
    "Kimi K2": {(2, "no |>")},
    "Kimi K3": {(1, "lost"), (7, "lost"), (11, "lost"), (13, "lost")},
    "MiniMax M2": {(4, "lost")},
    "MiniMax M3": {
        (0, "lost"),
        (1, "lost"),
        (6, "lost"),
        (7, "lost"),
        (9, "no last bracket"),
        (10, "lost"),
        (11, "lost"),
        (13, "lost"),
    },
    "dots": {(4, "lost")},
    "Muse Spark": {(4, "lost")},
    "Muse Glimmer": {(2, "lost"), (3, "lost"), (5, "lost")},
    "MiniCPM 5": {(0, "lost"), (3, "lost")},
    "Seed-OSS": {(2, "no last bracket"), (4, "lost"), (4, "no last bracket")},
    "Solar Open": {(2, "no |>"), (3, "no <|")},
    "PLaMo 3": {(2, "no |>"), (2, "no last |"), (3, "no <|"), (3, "no first |")},
}
"""Marks, counted from 0, whose damage gives a wrong call, or a call with some markup as text."""


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.title)
def test_a_damaged_mark_gives_the_call_or_text(family: Family) -> None:
    """Each mark of a call is damaged once; the call is read, or all of it is text."""
    format_ = ChatFormat.named(family.names.split()[0])
    tail = ">>>" if family.title == "Functionary 3.2" else ""
    misread = set()
    for shape in (family.shape, family.by_token and family.by_token[1]):
        text = written(shape, CALLS[:1]).rstrip() if shape else ""
        for number, mark in enumerate(MARK.finditer(text)):
            for damage, form in _damaged(mark[0]).items():
                broken = text[: mark.start()] + form + text[mark.end() :]
                message = parse_every_split(format_, broken, tools=TOOLS, tail=tail, count=1)
                content, _, made = plain(message)
                is_text = not made and content.strip() == broken.strip()
                if not is_text and (content.strip() or not _is_ferry(made)):
                    misread.add((number, damage))
    assert misread == MISREAD.get(family.title, set())


def _is_ferry(made: list[tuple[str, object]]) -> bool:
    """Whether there is only the first call, perhaps with a line break behind a value."""
    found = [(name, isinstance(given, dict) and _stripped(given)) for name, given in made]
    return found == CALLS[:1]
