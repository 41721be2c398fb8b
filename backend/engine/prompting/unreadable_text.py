"""The error of a tokenizer that fails for a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backend.engine.errors import InvalidRequest
from common.field_names import unmarked

_PANIC = "PanicException"  # of Rust, in no module that can be imported


class UnreadableText(InvalidRequest):
    """The model's tokenizer fails for a text."""


@contextmanager
def tokenizing() -> Iterator[None]:
    """Raise UnreadableText for an error of `tokenizers`.

    Its errors have the type Exception itself. A regular expression that backtracks without end is
    a panic instead, which is not even an Exception.
    """
    try:
        yield
    except BaseException as fault:
        if type(fault) is not Exception and type(fault).__name__ != _PANIC:
            raise
        why = unmarked(str(fault)).strip().partition("\n")[0][:200]
        raise UnreadableText(f"the model's tokenizer fails for this text: {why}") from None
