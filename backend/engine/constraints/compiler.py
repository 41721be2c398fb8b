"""Compiles what a request constrains its answer to, for one loaded model."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from typing import Any

import llguidance

from backend.engine.constraints.constraint import Constraint, bits_of, words
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.errors import InvalidRequest
from common.chat_format import ChatFormat


class ConstraintCompiler:
    """Used on prompt threads, by several at once.

    tokenizer: mlx-lm's TokenizerWrapper. vocabulary_size: width of the model's logits. end_tokens:
    ids that end an answer. chat_format: how this model writes reasoning and calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        end_tokens: Collection[int],
        chat_format: ChatFormat,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_tokens = sorted(end_tokens)
        self._chat_format = chat_format
        self._lock = threading.Lock()
        self._table: llguidance.LLTokenizer | None = None

    def compile(
        self,
        spec: ConstraintSpec,
        *,
        prompt_tail: str = "",
        answers_messages: bool = False,
        thinking: bool | None = None,
    ) -> Constraint:
        """The constraint of one row. Raises InvalidRequest."""
        if spec.kind != "json_schema":
            raise InvalidRequest(f"grammars of the kind {spec.kind} are not supported yet")
        table = self._tokens()
        text = llguidance.LLMatcher.grammar_from_json_schema(
            json.loads(spec.text),
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ?",
                "key_separator": ": ?",
            },
        )
        matcher = llguidance.LLMatcher(table, text, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"the JSON schema cannot be enforced: {matcher.get_error()}")
        length = words(self._vocabulary_size)
        top = min(table.vocab_size, self._vocabulary_size)
        return Constraint(
            matcher,
            bits_of(list(range(top)), length),
            bits_of([token for token in self._end_tokens if token < top], length),
            words(table.vocab_size),
        )

    def _tokens(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._table is None:
                backend = self._tokenizer.backend_tokenizer
                known = backend.get_vocab_size(with_added_tokens=True)
                self._table = llguidance.LLTokenizer(
                    backend.to_str(),
                    n_vocab=max(known, self._vocabulary_size),
                    eos_token=self._end_tokens,
                )
            return self._table
