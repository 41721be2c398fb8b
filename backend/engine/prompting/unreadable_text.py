"""Turns the errors of a tokenizer into errors of the request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backend.engine.errors import InvalidRequest
from common.field_names import unmarked

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
