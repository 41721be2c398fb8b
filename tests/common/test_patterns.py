"""In a call's grammar, a JSON schema's pattern allows the texts in which it occurs."""

from __future__ import annotations

import re

import llguidance
import pytest

from common.call_grammar.rules import shape_of
from tests.common.grammar_walks import byte_tokenizer, texts_of

TABLE = byte_tokenizer().table()


@pytest.mark.parametrize(
    ("pattern", "alphabet"),
    [
        (r"^https?:\/\/", b"htps:/"),
        ("^a/b$", b"a/b"),
        (r"^a\/b$", b"a/b\\"),
        ("^a|b$", b"abc"),
        ("a|b", b"abc"),
        ("^(a|b)$", b"abc"),
        ("^[|$]$", b"a|$"),
        (r"^a\$", b"a$b"),
        (r"^a\\$", b"a\\b"),
        (r"^\|a$", b"a|b"),
        ("b$", b"abc"),
        ("", b"ab"),
    ],
)
def test_it_allows_the_texts_in_which_a_search_finds_it(pattern: str, alphabet: bytes) -> None:
    grammar = llguidance.LLMatcher.grammar_from_lark(
        f"start: TEXT\nTEXT: {shape_of({'pattern': pattern})}"
    )
    matcher = llguidance.LLMatcher(TABLE, grammar)
    assert not matcher.get_error(), matcher.get_error()
    longest = 8 if pattern.startswith("^http") else 3
    if longest == 8:  # too many texts to enumerate
        for text in ("http://", "https://", "htt"):
            state = matcher.deep_copy()
            consumed = state.consume_tokens([*TABLE.tokenize_bytes(text.encode())])
            assert (consumed and state.is_accepting()) == bool(re.search(pattern, text))
        return
    allowed = set(texts_of(matcher, alphabet, longest))
    letters = [bytes([one]) for one in alphabet]
    every = [b"", *letters, *(a + b for a in letters for b in letters)]
    every += [a + b + c for a in letters for b in letters for c in letters]
    assert allowed == {text for text in every if re.search(pattern, text.decode())}
