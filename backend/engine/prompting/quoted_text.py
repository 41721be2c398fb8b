"""Tokenises a rendered prompt in which control strings are quoted, and converts tokenizers' errors.

`engine.prompting.control_tokens` inserts the marks. The text is divided at the control tokens that
the template has written. Pieces with a mark are tokenised by a second tokenizer, which differs from
the first only in that it knows no control tokens. The first tokenises everything else, as if
nothing were quoted.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.prompting.control_tokens import ControlTokens
from common.field_names import named, unmarked

_PANIC = "PanicException"  # PyO3's class, which cannot be imported


class UnreadableText(InvalidRequest):
    """The model's tokenizer fails for a text."""


@contextmanager
def tokenizing() -> Iterator[None]:
    """Raise UnreadableText for an error of the library `tokenizers` in the context.

    Its errors have exactly the type Exception. A regular expression that backtracks without end
    causes a panic of Rust, whose class is derived from BaseException.
    """
    try:
        yield
    except BaseException as fault:
        if type(fault) is not Exception and type(fault).__name__ != _PANIC:
            raise
        why = unmarked(str(fault)).strip().partition("\n")[0][:200]
        raise UnreadableText(f"the model's tokenizer fails for this text: {why}") from None


@dataclass(eq=False)
class QuotedText:
    """The two tokenizers of a model. The second is built when it is first needed."""

    control: ControlTokens
    backend: Any  # the underlying `tokenizers.Tokenizer`; None if the tokenizer has none
    encode: Callable[[str], list[int]]  # tokenises a text with the first tokenizer

    def __post_init__(self) -> None:
        self._literal: Any = None
        self._lock = threading.Lock()
        # No text contains names made from this random number.
        secret = secrets.token_hex(16)
        self._hidden, self._boundary = f"\ufdd0{secret}\ufdd0", f"\ufdd0{secret}\ufdd1"

    def tokenize(self, text: str, mark: str) -> list[int]:
        """Return the tokens of a prompt that was rendered with marks. Raises InvalidRequest."""
        tokens: list[int] = []
        for piece, tokenize in self._pieces(text, mark):
            tokens += tokenize(piece)
        return tokens

    def _pieces(self, text: str, mark: str) -> Iterator[tuple[str, Callable[[str], list[int]]]]:
        """Yield the pieces of a prompt without marks, each with what tokenises the piece."""
        unquoted = start = 0
        strip_next = False
        for found in [*self.control.written(mark).finditer(text), None]:
            end = len(text) if found is None else found.start()
            token = None if found is None else self.control.tokens[found[0]]
            between = text[start:end]
            if mark in between:
                if unquoted < start:
                    yield text[unquoted:start], self.encode
                # Control tokens may absorb adjacent spaces.
                between = between.lstrip() if strip_next else between
                between = between.rstrip() if token is not None and token.lstrip else between
                yield between.replace(mark, ""), self.literal if start else self._first_literal
                unquoted = end
            strip_next = token is not None and token.rstrip
            start = end if found is None else found.end()
        if unquoted < len(text):
            yield text[unquoted:], self.encode

    def literal(self, text: str) -> list[int]:
        """Return the tokens of a text after a control token, and quote its control strings."""
        # A tokenizer may treat the beginning of a text differently, so a piece that does not begin
        # the prompt is tokenised after another token.
        return self._first_literal(self._boundary + text)[1:] if text else []

    def _first_literal(self, text: str) -> list[int]:
        tokenizer = self._literal_tokenizer()
        # Unlike `encode`, `encode_batch` releases the interpreter's lock.
        with tokenizing():
            (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
        tokens: list[int] = encoding.ids
        return tokens

    def _literal_tokenizer(self) -> Any:
        if self.backend is None:
            raise InvalidRequest(
                f"{named('Messages')} contain the text of a control token, which this model's"
                " tokenizer cannot read as plain text: remove it from the content of users and"
                " tools"
            )
        with self._lock:
            if self._literal is None:
                from tokenizers import AddedToken, Tokenizer

                written = _without(self.backend.to_str(), set(self.control.tokens), self._hidden)
                self._literal = Tokenizer.from_str(written)
                self._literal.add_special_tokens([AddedToken(self._boundary, normalized=False)])
            return self._literal


def _without(tokenizer: str, control: set[str], hidden: str) -> str:
    """Return the tokenizer's JSON with its control strings renamed to strings that never occur.

    All ids stay the same. The strings may also be in the tokenizer model's own vocabulary, so they
    are renamed there too.
    """
    data = json.loads(tokenizer)
    data["post_processor"] = data["truncation"] = data["padding"] = None

    def renamed(text: str) -> str:
        return f"{hidden}{text}" if text in control else text

    for token in data["added_tokens"]:
        token["content"] = renamed(token["content"])
    model = data["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(piece): token for piece, token in vocabulary.items()}
    elif vocabulary is not None:
        model["vocab"] = [[renamed(piece), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed(model["unk_token"])
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if control.isdisjoint((left, right, left + right))
        ]
    return json.dumps(data, ensure_ascii=False)
