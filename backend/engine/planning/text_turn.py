"""Decides when sequences are preempted to free memory for a batch of texts to embed.

Usually texts are embedded in memory that sequences leave free, and cached prefixes are evicted for
them. But sequences may fill the memory for a long time. Waiting texts then get a turn: the newest
sequences are preempted, one batch of texts runs, and the sequences start again. Before a turn, the
texts wait at least twice as long as it will take to compute the preempted sequences again, so that
at least half of the time is spent on new tokens. Plain Python without MLX.
"""

from __future__ import annotations

from backend.engine.planning.charges import Charges
from backend.engine.planning.pace import Pace
from backend.engine.planning.sequence_state import SequenceTable

_LEAST_WAIT = 1.0  # seconds
_COST_FACTOR = 2.0


class TextTurn:
    """Decides the turns of the texts that one loaded model embeds.

    lacking: bytes of working memory for which the next batch of texts waits; 0 if none waits.
    """

    def __init__(self, sequences: SequenceTable, charges: Charges, pace: Pace) -> None:
        self._sequences, self._charges, self._pace = sequences, charges, pace
        self.lacking = 0
        self._since = 0.0

    def lack(self, nbytes: int, now: float) -> None:
        """Record for how many bytes the next batch waits; 0 after it has run."""
        if not self.lacking:
            self._since = now
        self.lacking = nbytes

    def claim(self, now: float, free: int) -> int:
        """Return the bytes that sequences must leave free in this step; 0 if it is not a turn.

        free: bytes that sequences leave free without a preemption.
        """
        wait = max(_COST_FACTOR * self._seconds_lost(self.lacking - free), _LEAST_WAIT)
        return self.lacking if now - self._since >= wait else 0

    def _seconds_lost(self, nbytes: int) -> float:
        """Return the seconds that it takes to recompute the newest sequences, with these bytes."""
        tokens = 0
        for sequence in reversed(self._sequences.admitted.values()):
            if nbytes <= 0:
                break
            nbytes -= sequence.width * self._charges.row(sequence.charged)
            tokens += sequence.total
        return tokens / (self._pace.tokens_per_second or float("inf"))
