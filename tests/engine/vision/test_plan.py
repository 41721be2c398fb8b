"""Where media are in a prompt, and when two prompts begin alike."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.vision.media_plan import MediaItem, MediaPlan, spliced
from tests.long import examples

MARKER = (901, 902)


def item(content: bytes, tokens: int) -> MediaItem:
    digest = hashlib.sha256(content).digest()
    return MediaItem("image", digest, tuple(range(499, 501 + tokens)), 1, tokens, {}, 0)


ITEMS = st.lists(st.builds(item, st.binary(max_size=2), st.integers(1, 20)), max_size=4)


@settings(max_examples=examples(60))
@given(ITEMS, st.data())
def test_items_are_where_their_markers_were(items: list[MediaItem], data: st.DataObject) -> None:
    texts = [data.draw(st.lists(st.integers(0, 400), max_size=5)) for _ in range(len(items) + 1)]
    tokens, places, expected = [], [], []
    for text, one in zip(texts, [*items, None], strict=True):
        tokens += text
        expected += text
        if one is not None:
            places.append((len(tokens), len(tokens) + len(MARKER)))
            tokens += MARKER
            expected += one.tokens
    prompt, spans = spliced(tokens, places, items)
    assert prompt == expected
    assert [prompt[span.start : span.stop] for span in spans] == [list(one.tokens) for one in items]
    plan = MediaPlan(prompt, spans)
    inside = {at for span in spans for at in range(span.start, span.stop)}
    assert len(plan.key) == len(prompt)
    for at, (key, token) in enumerate(zip(plan.key, prompt, strict=True)):
        assert key < 0 if at in inside else key == token
        assert key >= -(2**31)
    for length in range(len(prompt) + 1):
        before = plan.before(length)
        assert before <= length
        assert not any(span.start < before < span.stop for span in spans)
        assert before == length or any(span.start == before for span in spans)


@given(st.binary(max_size=8), st.binary(max_size=8), st.integers(1, 20))
def test_keys_are_equal_if_contents_are(left: bytes, right: bytes, tokens: int) -> None:
    assert (item(left, tokens).key == item(right, tokens).key) == (left == right)
