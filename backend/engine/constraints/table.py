"""llguidance's view of a model's tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from backend.engine.constraints.constraint import bits_of, words
from backend.engine.constraints.matching import TokenizerSource
from backend.engine.errors import InvalidRequest
from common.call_grammar.rules import SpecialTokens


@dataclass(frozen=True, eq=False, slots=True)
class TokenTable:
    """The tokens of one model. Building it takes about a second for 50,000 tokens."""

    tokens: llguidance.LLTokenizer
    known: np.ndarray  # mask of the ids that both model and tokenizer have
    ends: np.ndarray  # mask of the end tokens
    special: SpecialTokens

    @classmethod
    def of(cls, vocabulary: Mapping[str, int], width: int, source: TokenizerSource) -> TokenTable:
        """Build the table. Raises InvalidRequest.

        vocabulary: ids by text.
        width: number of logits.
        """
        try:
            tokens = source.read()
        except ValueError as fault:
            raise InvalidRequest(
                "answers of this model cannot be constrained, because its tokenizer is not"
                f" supported ({str(fault).splitlines()[0][:120]}): leave out the grammar, the"
                " schema, and calls that are required"
            ) from None
        known = {text: token for text, token in vocabulary.items() if token < width}
        special = {
            text: token for text, token in known.items() if text and tokens.is_special_token(token)
        }
        return cls(
            tokens,
            bits_of(sorted(set(known.values())), words(width)),
            bits_of(list(source.ends), words(width)),
            SpecialTokens(special),
        )


def source_of(backend: Any, width: int, end_tokens: Collection[int]) -> TokenizerSource:
    """Return the input for llguidance's tokenizer.

    backend: a tokenizers.Tokenizer.
    width: number of logits, at least the number of tokens.
    """
    known = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    ends = tuple(sorted(token for token in end_tokens if token < min(known, width)))
    definition = _unnormalised(backend.to_str())
    return TokenizerSource(definition, max(known, width) + (not ends), ends)


def _unnormalised(definition: str) -> str:
    """Return the tokenizer.json without normalisation steps that change the text.

    llguidance lets the tokenizer encode text that a grammar prescribes. If a normaliser composed or
    lower-cased letters, the tokens would differ from the text in the grammar.
    """
    key = ',"normalizer":'
    start = definition.index(key) + len(key)
    normalizer, end = json.JSONDecoder().raw_decode(definition, start)
    return definition[:start] + json.dumps(_spelling(normalizer)) + definition[end:]


def _spelling(normalizer: Any) -> dict[str, Any] | None:
    """Return the steps of a normaliser that only define how tokens write bytes and spaces."""
    match normalizer:
        case {"type": "Sequence", "normalizers": steps}:
            kept = [step for step in map(_spelling, steps) if step is not None]
            return {"type": "Sequence", "normalizers": kept} if kept else None
        case {"type": "ByteLevel" | "Prepend"} | {"type": "Replace", "pattern": {"String": " "}}:
            return dict(normalizer)
    return None
