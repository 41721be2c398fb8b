"""Decides whether completed prompts and their streams wait for others that arrived with them."""

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
# Streams also wait: each of their decode steps then follows a pass as long as on an idle server.
# This begins only while no stream has more than _YOUNG tokens, and lasts for at most _ONE_PAUSE
# times the pause of an idle server; or for _INTERRUPTED times the allowed pause if each pass
# completes at least _TOGETHER prompts, which would need far more time one by one.
_YOUNG = 3
_ONE_PAUSE = 1.5
_INTERRUPTED = 60
_TOGETHER = 2
# Prompts that arrive during the wait prolong it once, if they are at most half as many as the
# completed prompts, and need at most this share of the time that these have taken.
_LATE = 0.5


class Burst:
    """Makes completed prompts wait for prompts that arrived with them on an idle server.

    If the first completed prompts decoded immediately, the prefill passes of the others would be
    limited to the allowed pause, and each pass would interrupt all running streams. Without decode
    steps in between, no stream is interrupted, and the last stream begins much earlier.

    waits: whether completed prompts wait now; their first tokens are then not due yet.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since: float | None = None  # when the wait began, or was prolonged
        self._prolonged = False
        # the prompts for which streams wait, and the time from which they no longer do
        self._awaited: frozenset[int] = frozenset()
        self._awaited_until = 0.0

    @property
    def waits(self) -> bool:
        return self._since is not None

    def interrupts(
        self, streams: Sequence[SequenceState], filling: Sequence[SequenceState], now: float
    ) -> bool:
        """Return whether streams wait for prompts that arrived a moment after theirs.

        Prefilled within the pause for running streams, such prompts would need many passes, each of
        which interrupts the streams. Few long pauses at the beginning of the streams take less time
        from them, and the last prompt is completed much earlier.

        streams: the sequences that decode.
        filling: the sequences that have started and do not decode; those that only score are no
            prompts to wait for.
        now: as in `update`.
        """
        filling = [sequence for sequence in filling if sequence.filled < sequence.target]
        if not filling or not self._pace.known:
            return False
        numbers = {sequence.number for sequence in filling}
        if now < self._awaited_until and self._awaited & numbers:
            return True
        if len(filling) < len(streams) or any(
            len(sequence.generated) > _YOUNG for sequence in streams
        ):
            return False
        longest = max(sequence.target - sequence.filled for sequence in filling)
        if longest > _ALIKE * max(sequence.target for sequence in streams):
            return False
        return self._await(filling, now)

    def _await(self, filling: Sequence[SequenceState], now: float) -> bool:
        """Let streams wait for these prompts, unless these need too much time."""
        lefts = [sequence.target - sequence.filled for sequence in filling]
        most = _ONE_PAUSE * self._pace.pause(running=False)
        if _TOGETHER * max(lefts) <= self._pace.tokens(running=False):
            most = _INTERRUPTED * self._pace.pause(running=True)
        if self._pace.seconds(sum(lefts)) > most:
            return False
        self._awaited = frozenset(sequence.number for sequence in filling)
        self._awaited_until = now + most
        return True

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
        early = [sequence for sequence in filling if since is None or sequence.since <= since]
        lefts = [sequence.target - sequence.filled for sequence in early or filling]
        if decoding or not (completed and lefts and self._pace.known):
            return
        if any(sequence.generated for sequence in completed):
            return  # their streams have begun
        seconds = self._pace.seconds(sum(lefts))
        alike = max(lefts) <= _ALIKE * max(sequence.target for sequence in completed)
        if since is None:
            waited = now - max(sequence.since for sequence in completed)
            if not (alike and len(lefts) >= _MANY * len(completed)) and seconds > waited:
                return
            since, self._prolonged = now, False
        elif not early:
            taken = now - min(sequence.since for sequence in completed)
            few = 2 * len(lefts) <= len(completed) and seconds <= _LATE * taken
            if self._prolonged or not (alike and few):
                return
            since, self._prolonged = now, True
        if now + seconds - since <= _PAUSES * self._pace.pause(running=True):
            self._since = since
        else:
            self._await(early or filling, now)
