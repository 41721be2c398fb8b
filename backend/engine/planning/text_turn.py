"""Decides when sequences are preempted to free memory for a batch of texts to embed.

Texts run in memory that sequences leave free; cached prefixes are evicted for them. Sequences may
fill the memory for as long as they run, so texts that wait get a turn: the newest sequences are
preempted, one batch of texts runs, and then the sequences start again. A turn comes only after
twice the time that it takes to compute these sequences again, so at least half of the time is left
for their tokens. Plain Python without MLX.
"""

from __future__ import annotations

from backend.engine.planning.charges import Charges
from backend.engine.planning.pace import Pace
from backend.engine.planning.sequence_table import SequenceTable

_LEAST_WAIT = 1.0  # seconds
_COST_FACTOR = 2.0


class TextTurn:
    """The turns of one loaded model.

    lacking: bytes for which the next batch of texts waits; 0 if none waits.
    """

    def __init__(self, sequences: SequenceTable, charges: Charges, pace: Pace) -> None:
        self._sequences, self._charges, self._pace = sequences, charges, pace
        self.lacking = 0
        self._since = 0.0

    def lack(self, nbytes: int, now: float) -> None:
        """Record that the next batch waits for this many bytes, or that it has run."""
        if not self.lacking:
            self._since = now
        self.lacking = nbytes

    def claim(self, now: float, free: int) -> int:
        """Return the bytes that sequences must leave free in this step.

        free: bytes that they leave free without a turn.
        """
        wait = max(_COST_FACTOR * self._seconds_lost(self.lacking - free), _LEAST_WAIT)
        return self.lacking if now - self._since >= wait else 0

    def _seconds_lost(self, nbytes: int) -> float:
        """Return the seconds for computing again the newest sequences that use these bytes."""
        tokens = 0
        for sequence in reversed(self._sequences.admitted.values()):
            if nbytes <= 0:
                break
            nbytes -= sequence.width * self._charges.row(sequence.charged)
            tokens += sequence.total
        return tokens / (self._pace.tokens_per_second or float("inf"))
