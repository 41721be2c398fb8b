"""Drives a scheduler by hand, on the test's own thread, one round at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.engine.caching import kv
from backend.engine.commands import Submit
from backend.engine.engine_state import Gauges
from backend.engine.errors import EngineError
from backend.engine.events import Finished, GrowingText, Progress, Undelivered
from backend.engine.executing.score_plan import ScorePlan
from backend.engine.model import EngineModel
from backend.engine.planning.prefix_index import PrefixKey
from backend.engine.request import GenerationRequest, RawPrompt, Sampling
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.scheduler import Scheduler
from backend.engine.token_text import ByteStream

MIB = 1 << 20
HOUR = 3_600_000  # milliseconds


def engine_model(model: Any, **changes: Any) -> EngineModel:
    """An EngineModel whose token 0 ends a sequence and whose other tokens have the text `<id>`.

    The allowed pause is an hour, so that passes are equally long however busy the machine is.
    """
    table = [f"<{token}>".encode() for token in range(4096)]
    settings: dict[str, Any] = {
        "model": model,
        "head": LogitsHead(model, kv.vocabulary_size(model)),
        "vocabulary": kv.vocabulary_size(model),
        "end_tokens": frozenset({0}),
        "new_text": lambda continues: ByteStream(table.__getitem__, strip_first_space=False),
        "cost": kv.cost(model),
        "trims": kv.always_trims(kv.new_row(model)),
        "together": _together(model),
        "slots": 6,
        "weights_bytes": 0,
        "memory_limit": 512 * MIB,
        "prompt_cache_bytes": 64 * MIB,
        "max_cache_entries": 0,
        "prefill_chunk": 32,
        "stall_ms": HOUR,
    }
    return EngineModel(**(settings | changes))


def _together(model: Any) -> bool:
    try:
        return kv.can_prefill_together(model)
    except Exception:  # a model with an injected fault
        return True


@dataclass
class Received:
    """The events of one request."""

    text: str = ""
    finished: Finished | None = None
    error: EngineError | None = None

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.text.replace(">", " ").replace("<", " ").split()]


@dataclass
class Rounds:
    """A scheduler and everything that it has published.

    more: whether the scheduler believes that further prompts have arrived.
    """

    model: EngineModel
    more: bool = False
    received: dict[int, Received] = field(default_factory=dict)
    faults: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gauges = Gauges()
        self.scheduler = Scheduler(
            self.model,
            self._take,
            lambda where, fault: self.faults.append(fault),
            self.gauges,
            more=lambda: self.more,
        )

    def submit(self, ticket: int, prompt: Sequence[int], limit: int, **request: Any) -> None:
        self.received[ticket] = Received()
        sampling = request.pop("sampling", Sampling())
        constraint = request.pop("grammar", None)
        places = request.pop("places", ())
        stored = request.pop("stored", None)
        wanted = GenerationRequest(str(ticket), RawPrompt(""), sampling, **request)
        key, adapter = None, 0
        if wanted.adapter:
            assert self.model.adapters is not None
            adapter = self.model.adapters.numbers[wanted.adapter]
            key = PrefixKey(prompt).computed_by(adapter)
        self.scheduler.submit(
            Submit(
                1,
                ticket,
                wanted,
                list(prompt),
                limit,
                constraint,
                stored,
                positions=places,
                key=key,
                adapter=adapter,
            )
        )

    def score(self, ticket: int, plan: ScorePlan) -> None:
        self.received[ticket] = Received()
        wanted = GenerationRequest(str(ticket), RawPrompt(""))
        self.scheduler.submit(
            Submit(1, ticket, wanted, plan.prefix, max(plan.longest, 1), plan=plan)
        )

    def step(self) -> None:
        self.scheduler.step()

    def tickets(self, state: str) -> list[int]:
        """The numbers of the sequences in a state of the planner."""
        return [one.number for one in self.scheduler.planner.sequences.of(state)]

    @property
    def admitted(self) -> list[int]:
        return list(self.scheduler.planner.sequences.admitted)

    def drain(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.scheduler.busy:
                return
            self.step()
        raise AssertionError(f"rows still run after {most} rounds")

    def _take(self, ticket: int, what: Undelivered | EngineError) -> None:
        received = self.received[ticket]
        assert received.finished is None, "an event after the end"
        assert received.error is None, "an event after a failure"
        match what:
            case GrowingText():
                received.text += what.close().text
            case Finished():
                received.finished = what
            case Progress():
                pass
            case EngineError():
                received.error = what
            case _:
                raise AssertionError(f"an event of another kind of request: {what}")


def alone(model: EngineModel, prompt: Sequence[int], limit: int, **request: Any) -> Received:
    """The events of a request that runs alone, with nothing stored."""
    rounds = Rounds(model)
    rounds.submit(1, prompt, limit, **request)
    rounds.drain()
    return rounds.received[1]
