"""The policy that the planner replaced: first come, first served; one batch; one prompt per pass.

It stores and finds prefixes like the planner, so only its decisions differ: the order of admission,
memory charged as the number of rows times the longest row, round robin in prefill, and answers that
end with an error when memory runs out.
"""

from __future__ import annotations

from backend.engine.plan import Leave, Limits, Prefill, Refusal, Score, Start
from backend.engine.planner import Planner, SequenceState
from backend.engine.prefill import SMALLEST_STEP

_AHEAD = 2048  # tokens of output that a new sequence is charged for
_GROWTH = 256  # tokens by which the charge stays ahead


class Former(Planner):
    bounded = False  # it did not count snapshots

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._turns: dict[int, int] = {}  # the step of each sequence's latest turn in prefill

    def _used(self) -> int:
        return self._whole(self.admitted)

    def _whole(self, rows: list[SequenceState]) -> int:
        longest = max(map(_expected, rows), default=0)
        return sum(one.width for one in rows) * self.limits.cost.of(longest) if rows else 0

    def _make_room(self) -> tuple[list[Leave], list[Refusal]]:
        preempted: list[Leave] = []
        refused: list[Refusal] = []
        while (used := self._used()) > self._room and (admitted := self.admitted):
            prefilling = [one for one in admitted if one.state == "prefill"]
            if prefilling:
                self._back_to_waiting(prefilling[-1])
                preempted.append(Leave(prefilling[-1].number))
            else:
                refused.append(self._refuse(admitted[-1], used))
        self._shrink(self._room - used)
        return preempted, refused

    def _admit(self, now: float) -> tuple[list[Start], list[Refusal]]:  # noqa: ARG002
        starts: list[Start] = []
        refused: list[Refusal] = []
        expecting = 0
        for one in sorted(self.of("waiting"), key=lambda one: one.number):
            if len(self.admitted) + expecting >= self.limits.slots:
                break
            if one.preempted_in == self._steps:
                break
            source = self._source(one)
            if self._expects(one, source):
                expecting += 1
                continue
            needed = self._whole([*self.admitted, one]) + self.limits.cost.of(one.total)
            if needed > self._room:
                if self.admitted:
                    break
                refused.append(self._refuse(one, needed))
                continue
            if self._crowded(self._room - needed):
                break
            starts.append(self._start(one, source, self._room - needed))
        return starts, refused

    def _batch_for(self, one: SequenceState) -> int:  # noqa: ARG002
        return 1

    def _prefill(
        self,
        now: float,  # noqa: ARG002
        room: int,  # noqa: ARG002
        *,
        running: bool,
    ) -> tuple[list[tuple[Prefill, ...]], list[Score], int]:
        budget = self.pace.tokens(running=running)
        rows = sorted(
            (one for one in self.of("prefill") if one.filled < one.target),
            key=lambda one: self._turns.get(one.number, 0),
        )
        passes: list[tuple[Prefill, ...]] = []
        for one in rows:
            if budget <= 0:
                break
            part = self._chunk(one, budget)
            passes.append((part,))
            budget -= max(part.end - part.start, SMALLEST_STEP)
            self._turns[one.number] = self._steps
        return passes, [], 0


def _expected(one: SequenceState) -> int:
    return one.prompt + min(one.arrived.limit, max(_AHEAD, len(one.generated) + _GROWTH))
