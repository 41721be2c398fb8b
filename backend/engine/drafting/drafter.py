"""What guesses the next tokens of the one row that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Follows one row at a time, from its first `propose` to `forget`.

    In between, `tokens` only grows, by any number of tokens from call to call: steps that nobody
    guessed for are caught up with. A drafter decides speed, never output.
    """

    def ready(self, length: int) -> bool:
        """Whether it pays to ask when the row has `length` tokens.

        False after guesses that failed: the caller may take its plain, overlapped step, which
        does not wait for the latest token to be read.
        """
        ...

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` guesses for what follows the row's whole prompt and output; [] for none.

        Takes bounded time however long `tokens` is.
        """
        ...

    def told(self, proposed: int, accepted: int) -> None:
        """What became of the latest guesses: the first `accepted` of `proposed` were right."""
        ...

    def forget(self) -> None:
        """The row has left; the next call of `propose` is for another one."""
        ...
