"""Provides the executor of rank 0, which sends each action to the other ranks first."""

from __future__ import annotations

from collections.abc import Iterable

from backend.engine.errors import EngineError
from backend.engine.executing.executor import Executor
from backend.engine.executing.executor_sequence import GRAMMAR, ExecutorSequence
from backend.engine.model import EngineModel
from backend.engine.planning.plan import PlannerEvent, StepPlan
from backend.engine.ranks.leader import Leader
from backend.engine.ranks.wire import Add, Signal, Step


class LeadingExecutor(Executor):
    """An executor that carries out plans on all ranks.

    An error of MLX raises RankLost and ends the group: the other ranks may be waiting for rank 0 in
    a collective, which only the end of their processes can interrupt.
    """

    def __init__(self, model: EngineModel, leader: Leader) -> None:
        super().__init__(model)
        self._leader = leader
        leader.send(Signal.OPEN)

    def add(self, sequence: ExecutorSequence) -> None:
        scoring = sequence.scoring
        self._leader.send(
            Add(
                sequence.number,
                sequence.prompt,
                sequence.limit,
                prompt_logprobs=sequence.request.prompt_logprobs is not None,
                scores=scoring.plan if scoring is not None else None,
                side_by_side=self._model.batches,
            )
        )
        super().add(sequence)

    def launch(self, plan: StepPlan) -> list[PlannerEvent]:
        self._leader.send(Step(plan))
        return super().launch(plan)

    def settle(self, *, idle: bool) -> list[PlannerEvent]:
        events = super().settle(idle=idle)
        for failure in self.failures:
            if failure.where != GRAMMAR and not isinstance(failure.fault, EngineError):
                raise self._leader.fault(failure.fault)
        return events

    def clear(self) -> None:
        self._leader.send(Signal.CLEAR)
        super().clear()

    def _failed(self, sequences: Iterable[ExecutorSequence], where: str, fault: Exception) -> None:
        if not isinstance(fault, EngineError):
            raise self._leader.fault(fault)
        super()._failed(sequences, where, fault)
