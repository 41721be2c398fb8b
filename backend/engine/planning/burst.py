"""Decides whether completed prompts wait for others that arrived together with them."""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.planning.pace import Pace
from backend.engine.planning.sequence_state import SequenceState

# Completed prompts wait for at most this multiple of the allowed pause.
_PAUSES = 20
# They wait if there are at least _MANY unfinished prompts for each completed prompt, and none of
# these has more than _ALIKE times the tokens of the longest completed prompt. They also wait if the
# unfinished prompts need no more time than the completed prompts have taken since they arrived.
_MANY = 2
_ALIKE = 4


class Burst:
    """Makes completed prompts wait for prompts that arrived with them on an idle server.

    If the first completed prompts decoded immediately, the prefill passes of the others would be
    limited to the allowed pause, and each pass would interrupt all running streams. Without decode
    steps in between, no stream is interrupted, and the last stream begins much earlier.

    waits: whether completed prompts wait now; their first tokens are then not due yet.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since: float | None = None  # when the first prompt was completed

    @property
    def waits(self) -> bool:
        return self._since is not None

    def update(
        self,
        completed: Sequence[SequenceState],
        filling: Sequence[SequenceState],
        now: float,
        *,
        decoding: bool,
    ) -> None:
        """Decide whether completed prompts wait.

        completed: the prefilled sequences that have not joined a batch.
        filling: the sequences whose prompts are not completed.
        now: seconds, on the clock of `SequenceState.since`.
        decoding: whether sequences decode, so that no prompt waits.
        """
        since, self._since = self._since, None
        lefts = [
            sequence.target - sequence.filled
            for sequence in filling
            if since is None or sequence.since <= since
        ]
        if decoding or not (completed and lefts and self._pace.known):
            return
        if any(sequence.generated for sequence in completed):
            return  # their streams have begun
        seconds = self._pace.seconds(sum(lefts))
        if since is None:
            waited = now - max(sequence.since for sequence in completed)
            longest = max(sequence.target for sequence in completed)
            many = len(lefts) >= _MANY * len(completed) and max(lefts) <= _ALIKE * longest
            if not many and seconds > waited:
                return
            since = now
        if now + seconds - since <= _PAUSES * self._pace.pause(running=True):
            self._since = since
