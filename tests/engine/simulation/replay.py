"""Replays conversations against a planner, in simulated time."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend.engine.planning.plan import Arrived, Ended, PlannerEvent
from backend.engine.planning.planner import Planner
from backend.engine.planning.prefix_index import PrefixKey
from tests.engine.simulation.device import BrokenPlanError, DeviceSequence, Ran, SimulatedDevice
from tests.engine.simulation.setup import Setup
from tests.engine.simulation.traffic import LIMIT, Conversation, Kind

_AT_ONCE = 16  # decode steps that are simulated together if nothing else happens
_IDLE_STEPS = 1000  # without progress, after which the planner counts as stuck


@dataclass(slots=True)
class Request:
    """One turn and its result. Times are in seconds since the beginning.

    known: prompt tokens that an earlier request or the shared system prompt had. end: "answered",
    "left" or "refused". overtaken: how many later requests started before it.
    """

    kind: Kind
    arrived: float
    prompt: int
    known: int
    answer: int
    alone: float = 0.0
    reused: int | None = None
    first: float | None = None
    latest: float = 0.0
    ended: float = 0.0
    end: str = ""
    overtaken: int = 0


@dataclass(slots=True)
class Replayed:
    """The results of one run. gaps: seconds between the tokens of a stream."""

    requests: list[Request] = field(default_factory=list)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    computed: int = 0
    peak: int = 0


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    request: Request
    conversation: Conversation
    turn: int
    sequence: DeviceSequence


class Replay:
    """One planner under one load."""

    def __init__(
        self, setup: Setup, planner: Planner, conversations: Sequence[Conversation]
    ) -> None:
        self._setup = setup
        self._planner = planner
        self._device = SimulatedDevice(setup, planner.limits)
        self._now = 0.0
        self._numbers = 0
        self._due: list[tuple[float, int, Conversation | None, int, PrefixKey | None]] = []
        self._live: dict[int, _Live] = {}
        self._unstarted: dict[int, _Live] = {}
        self._events: list[PlannerEvent] = []
        self._idle = 0
        self.result = Replayed()
        for conversation in conversations:
            self._wait(conversation.start, conversation, 0, conversation.system)

    def run(self) -> Replayed:
        """Run until the last request has ended. Raises BrokenPlanError."""
        while self._due or self._live or self._events or self._planner.busy:
            if not (self._live or self._events or self._planner.busy):
                self._now = max(self._now, self._due[0][0])
            self._take_due()
            self._step()
        result = self.result
        result.seconds, result.peak = self._now, self._device.peak
        left = self._device.sequences
        if left or any(not request.end for request in result.requests):
            raise BrokenPlanError(f"{len(left)} sequences never left")
        return result

    # Clients.

    def _wait(
        self, when: float, conversation: Conversation | None, turn: int, key: PrefixKey | None
    ) -> None:
        """Schedule a turn or, without a conversation, the departure of request `turn`'s client."""
        self._numbers += 1
        heapq.heappush(self._due, (when, self._numbers, conversation, turn, key))

    def _take_due(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            when, number, conversation, turn, key = heapq.heappop(self._due)
            if conversation is not None:
                assert key is not None
                self._arrive(when, number, conversation, turn, key)
            elif (live := self._live.get(turn)) is not None:
                self._events.append(Ended(turn))
                self._end(live, "left")

    def _arrive(
        self, when: float, number: int, conversation: Conversation, turn: int, before: PrefixKey
    ) -> None:
        new = conversation.turns[turn].new
        tokens = conversation.tokens(turn)
        key = before.extended(tokens[:new])
        answer: list[int] = tokens[new:].tolist()
        request = Request(conversation.kind, when, len(key), len(before), len(answer))
        request.alone = self._setup.alone_seconds(len(before), len(key), len(answer))
        self.result.requests.append(request)
        live = _Live(request, conversation, turn, DeviceSequence(number, key, answer))
        self._live[number] = self._unstarted[number] = live
        self._device.add(live.sequence)
        self._events.append(
            Arrived(
                number,
                key,
                (0,) * len(key),  # only their number counts
                LIMIT,
                positions=(len(conversation.system),),
            )
        )
        patience = conversation.turns[turn].patience
        if patience is not None:
            self._wait(when + patience, None, number, None)

    def _end(self, live: _Live, how: str) -> None:
        """End a request; its client continues with the answer that it received."""
        request, sequence = live.request, live.sequence
        if request.end:
            raise BrokenPlanError(f"sequence {sequence.number} ends twice")
        request.end, request.ended = how, self._now
        del self._live[sequence.number]
        self._unstarted.pop(sequence.number, None)
        turn = live.turn + 1
        if turn < len(live.conversation.turns):
            known = sequence.key.extended(sequence.answer[: sequence.produced])
            pause = live.conversation.turns[turn].pause
            self._wait(self._now + pause, live.conversation, turn, known)

    # Steps.

    def _step(self) -> None:
        events, self._events = self._events, []
        plan = self._planner.plan(self._now, events)
        self.result.preemptions += len(plan.preempt)
        for refusal in plan.refuse:
            self._end(self._live[refusal.sequence], "refused")
        ran = self._device.run(plan)
        self._take(ran, 1)
        for number, reused in ran.reused:
            self._count_start(number, reused)
        progress = bool(ran.seconds or plan.leave or plan.refuse or plan.evict or events)
        self._idle = 0 if progress else self._idle + 1
        if self._idle > _IDLE_STEPS or (not progress and self._live and not self._due):
            raise BrokenPlanError(f"{len(self._live)} requests wait, and nothing is done")
        if not progress and self._due:
            self._now = max(self._now, self._due[0][0])
        elif ran.quiet:
            self._decode_on(ran.seconds)

    def _decode_on(self, step: float) -> None:
        """Decode until something can change the next plan; until then it would be the same.

        Without prefill and new events, free memory only shrinks, so the planner admits nothing that
        it does not admit now. Its memory charges already cover the tokens of these steps.
        """
        steps = min(_AT_ONCE, self._device.shortest_left()) - 1
        if self._due:
            steps = min(steps, int((self._due[0][0] - self._now) / step))
        if steps > 0 and not any(isinstance(event, Ended) for event in self._events):
            self._take(self._device.decode_on(steps), steps)

    def _take(self, ran: Ran, steps: int) -> None:
        """Deliver the tokens of one or more equal steps."""
        result = self.result
        result.steps += steps
        result.computed += ran.computed
        self._events += ran.events
        began, self._now = self._now, self._now + ran.tokens_after
        for sequence in ran.tokens:
            live = self._live[sequence.number]
            request = live.request
            if request.first is None:
                request.first = request.latest = began + ran.tokens_after / steps
                pause = (self._now - request.first) / max(steps - 1, 1)
                result.gaps.extend([pause] * (steps - 1))
            else:
                pause = (self._now - request.latest) / steps
                result.gaps.extend([pause] * steps)
            request.latest = self._now
            if sequence.produced == len(sequence.answer):
                self._events.append(Ended(sequence.number))
                self._end(live, "answered")
        self._now = began + ran.seconds

    def _count_start(self, number: int, reused: int) -> None:
        live = self._unstarted.pop(number, None)
        if live is None:
            return
        live.request.reused = reused
        for other in self._unstarted.values():
            other.request.overtaken += other.sequence.number < number
