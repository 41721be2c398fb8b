"""Creates llguidance matchers, in the backend and in the process that tries grammars."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import llguidance

LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=6_000,
    max_items_in_row=5_000,
    verbose_errors=False,
)
"""Limits of one matcher: about 100 MB for the lexer, and a tenth of a second for one mask. A mask
cannot be interrupted, and its time grows with the square of its Earley items. A schema with a
thousand optional properties needs 4,000 of them."""

_sizing = threading.Lock()
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The input for llguidance's tokenizer."""

    definition: str  # the contents of a tokenizer.json
    size: int  # total number of tokens
    # The end tokens. If there are none, the last of the `size` ids must be an id that the model
    # does not have.
    ends: tuple[int, ...]

    def read(self) -> llguidance.LLTokenizer:
        """Build the tokenizer; about a second for 50,000 tokens. Raises ValueError."""
        ends = list(self.ends) or [self.size - 1]
        return llguidance.LLTokenizer(self.definition, n_vocab=self.size, eos_token=ends)


def matcher_of(tokens: llguidance.LLTokenizer, grammars: str) -> llguidance.LLMatcher:
    """Return the matcher for a list of grammars (JSON).

    Its first mask is computed here, because llguidance reports some errors only then.
    """
    made = llguidance.LLMatcher(tokens, grammars, log_level=0, limits=LIMITS)
    if not made.is_error():
        made.compute_bitmask()
    return made


def on_stack(size: int, work: Callable[[], Result]) -> Result:
    """Run `work` on a thread with a stack of `size` bytes; returns or raises what `work` does."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as fault:
            outcome.set_exception(fault)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _sizing:
        usual = threading.stack_size(size)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return outcome.result()
