"""Parts are read one after the other, or not at all, however the text is split."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from common.formats.cursor import SPACE, Cursor, Part, Wait

_WORD = re.compile(r"\w+")
_PARTS: list[tuple[Part, str]] = [
    ("<a", "<a"),
    (("<a>", "<a", ""), "(?:<a>|<a|)"),
    ((":", "="), "[:=]"),
    (SPACE, r"[ \t\r\n]*+"),
    (_WORD, r"\w++"),
]


def _read(pieces: list[str], parts: list[Part], *, ahead: bool) -> tuple[tuple[str, ...], str]:
    """Return the texts of the parts, and the text that is left."""
    cursor = Cursor()

    def grammar() -> Wait[tuple[tuple[str, ...], str]]:
        found = yield from (cursor.follow if ahead else cursor.accept_all)(*parts)
        while (yield from cursor.more()) and not cursor.ended:
            yield
        return found, cursor.pending

    running = grammar()
    for piece in pieces:
        cursor.feed(piece)
        next(running, None)
    cursor.ended = True
    try:
        next(running)
    except StopIteration as end:
        result: tuple[tuple[str, ...], str] = end.value
        return result
    raise AssertionError("the grammar waits after the end")


@given(
    text=st.text("<a>:= \nb", max_size=8),
    chosen=st.lists(st.sampled_from(_PARTS), min_size=1, max_size=5),
    place=st.integers(0, 8),
)
def test_parts_are_found_in_every_split(
    text: str, chosen: list[tuple[Part, str]], place: int
) -> None:
    parts = [part for part, _ in chosen]
    match = re.match("".join(f"(?>({pattern}))" for _, pattern in chosen), text)
    expected = match.groups() if match else ()
    for pieces in ([text], list(text), [text[:place], text[place:]]):
        assert _read(pieces, parts, ahead=False) == (expected, text[len("".join(expected)) :])
        assert _read(pieces, parts, ahead=True) == (expected, text)
