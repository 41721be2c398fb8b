"""The policy that preceded the planner: first come, first served; one batch; one prompt per pass.

It stores and finds prefixes like the planner, so only its decisions differ: the order of admission,
memory charged as the number of rows times the longest row, round robin in prefill, and answers that
end with an error when memory runs out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backend.engine.planning.charges import Charges
from backend.engine.planning.pace import SMALLEST_STEP, Pace
from backend.engine.planning.plan import CacheCost, Leave, Limits, Prefill, Refusal, Score, Start
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefill_turns import PrefillTurns, stretch
from backend.engine.planning.sequence_state import SequenceState
from backend.engine.planning.sequence_table import SequenceTable

_AHEAD = 2048  # tokens of output that a new sequence is charged for
_GROWTH = 256  # the charge covers at least this many tokens beyond those generated so far


class Predecessor(Planner):
    bounded = False  # snapshots are not charged for

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._charges = _OneRectangle(limits)
        self._turns = _RoundRobin(limits, self._charges, self.pace)

    def _make_room(self) -> tuple[list[Leave], list[Refusal], int]:
        preempted: list[Leave] = []
        refused: list[Refusal] = []
        while (used := self._used()) > self._room and (
            admitted := list(self.sequences.admitted.values())
        ):
            prefilling = [one for one in admitted if one.state == "prefill"]
            if prefilling:
                self.sequences.preempt(prefilling[-1], self._steps)
                preempted.append(Leave(prefilling[-1].number))
            else:
                refused.append(self._refuse(admitted[-1], used))
        self._shrink(self._room - used)
        return preempted, refused, used

    def _admit(self, now: float) -> tuple[list[Start], list[Refusal]]:  # noqa: ARG002
        starts: list[Start] = []
        refused: list[Refusal] = []
        expecting = 0
        for one in sorted(self.sequences.of("waiting"), key=lambda one: one.number):
            if len(self.sequences.admitted) + expecting >= self.limits.slots:
                break
            if one.preempted_in == self._steps:
                break
            source = self._sources.choose(one)
            if self._sources.expects(one, source, self._room):
                expecting += 1
                continue
            admitted = [*self.sequences.admitted.values(), one]
            needed = _whole(admitted, self.limits.cost) + self.limits.cost.of(one.total)
            if needed > self._room:
                if self.sequences.admitted:
                    break
                refused.append(self._refuse(one, needed))
                continue
            if self.entries.copied_bytes > max(self._room - needed, 0):
                break
            starts.append(self._start(one, source, self._room - needed))
        return starts, refused

    def _batch_for(self, one: SequenceState) -> int:  # noqa: ARG002
        return 1


class _OneRectangle(Charges):
    def used(self, sequences: SequenceTable) -> int:
        return _whole(sequences.admitted.values(), self._cost)


class _RoundRobin(PrefillTurns):
    def __init__(self, limits: Limits, charges: Charges, pace: Pace) -> None:
        super().__init__(limits, charges, pace)
        self._steps = 0
        self._latest: dict[int, int] = {}  # the step of each sequence's latest turn

    def choose(
        self,
        filling: Sequence[SequenceState],
        now: float,  # noqa: ARG002
        room: int,  # noqa: ARG002
        *,
        running: bool,
    ) -> tuple[list[tuple[Prefill, ...]], list[Score], int]:
        self._steps += 1
        budget = self._pace.tokens(running=running)
        rows = sorted(
            (one for one in filling if one.filled < one.target),
            key=lambda one: self._latest.get(one.number, 0),
        )
        passes: list[tuple[Prefill, ...]] = []
        for one in rows:
            if budget <= 0:
                break
            part = stretch(one, budget)
            passes.append((part,))
            budget -= max(part.end - part.start, SMALLEST_STEP)
            self._latest[one.number] = self._steps
        return passes, [], 0


def _whole(rows: Collection[SequenceState], cost: CacheCost) -> int:
    longest = max(map(_expected, rows), default=0)
    return sum(one.width for one in rows) * cost.of(longest) if rows else 0


def _expected(one: SequenceState) -> int:
    return one.prompt + min(one.arrived.limit, max(_AHEAD, len(one.generated) + _GROWTH))
