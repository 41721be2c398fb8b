"""Stop strings, compared with a reference that reads the text character by character."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from common.stop_strings import StopMatcher

TEXT = st.text(alphabet="abc", max_size=20)
STOPS = st.lists(st.text(alphabet="abc", max_size=4), max_size=3)


def _reference(text: str, stops: list[str]) -> tuple[str, str]:
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], text[min(starts) : end]
    return text, ""


@given(TEXT, STOPS, st.data())
def test_any_split_equals_reading_by_character(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(text[left:right]) for left, right in itertools.pairwise(cuts))
    found = matcher.found
    shown += matcher.finish()
    assert (shown, found) == _reference(text, stops)


@given(TEXT, STOPS)
def test_text_is_withheld_only_while_it_may_become_a_stop_string(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for read in range(1, len(text) + 1):
        shown += matcher.feed(text[read - 1])
        if matcher.found:
            return
        held = text[len(shown) : read]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_unicode_and_several_stops() -> None:
    matcher = StopMatcher(["终止", "\n\n", ""])
    assert matcher.feed("你好\n") == "你好"
    assert matcher.feed("终") == "\n"
    assert matcher.feed("止后") == ""
    assert matcher.found
    assert matcher.feed("more") == ""
    assert matcher.finish() == ""
