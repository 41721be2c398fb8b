"""The tokens at the end of an answer are found in every split of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.formats.end_tokens import EndTokens
from tests.long import examples

_PIECES = st.lists(
    st.sampled_from(["</s>", "<|im_end|>", "[e~[", "<s>", "<", "</", "[", "e~[", " ", "\n", "a"])
)


def shown(pieces: list[str]) -> str:
    tokens = EndTokens(())
    return "".join([*map(tokens.feed, pieces), tokens.finish()])


@given(_PIECES)
@settings(max_examples=examples(300))
def test_no_split_matters(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert shown(pieces) == shown([text]) == shown(list(text))
    assert text.startswith(shown(pieces))


def test_what_is_held_back_is_known() -> None:
    tokens = EndTokens(())
    assert tokens.feed("Hm.</s> <|im") == "Hm."
    assert tokens.held == "</s> <|im"
    assert tokens.feed("age") == "</s> <|image"


def test_the_markers_of_the_family_are_left_to_its_grammar() -> None:
    assert EndTokens({"<|end|>"}).feed("Hm.<|end|>") == "Hm.<|end|>"


def test_many_tokens_take_linear_time() -> None:
    tokens = EndTokens(())
    assert "".join(tokens.feed("</s>") for _ in range(20_000)) == ""
    assert not tokens.finish()
