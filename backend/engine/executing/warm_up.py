"""Runs typical prompts, so that the first real requests are not slow.

On a GPU the first use of a shape compiles kernels. During the load, one short prompt runs alone and
two run in a batch. Later, longer prompts run, up to a whole prefill pass, as long as the next is
certain to fit in the time.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import replace

from backend.engine.commands import Submit
from backend.engine.engine_state import Gauges
from backend.engine.errors import Cancelled, EngineError, NotFinite
from backend.engine.events import Undelivered
from backend.engine.loading.stages import Stages
from backend.engine.model import EngineModel
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from backend.engine.scheduler import Scheduler

_log = logging.getLogger(__name__)

SHORT, _USUAL = 8, 64  # tokens of a prompt
_SECONDS = 2.0  # for all steps; the shortest prompt always runs
_GENERATED = 2


def warm_up(model: EngineModel, most_tokens: int, *, begun: bool = False) -> Stages[None]:
    """Run each step of the prompts as a stage on the engine thread. Faults are only logged.

    most_tokens: maximum length of a prompt.
    begun: whether short prompts have already run, alone and in a batch.
    Raises NotFinite if logits are not finite, because the model could not answer any prompt.
    """
    broken: list[NotFinite] = []

    def publish(_: int, what: Undelivered | EngineError) -> None:
        if isinstance(what, NotFinite):
            broken.append(what)

    scheduler = Scheduler(
        replace(model, disk=None),
        publish,
        lambda where, fault: _log.warning("warm-up: %s failed", where, exc_info=fault),
        Gauges(),
    )
    rounds = [(_USUAL, 1), (_USUAL, 1), (most_tokens, 1)]
    if not begun:
        rounds = [(SHORT, 1), (SHORT, 2), *rounds]
    tickets = itertools.count(1)
    left = _SECONDS
    per_token = 0.0  # seconds, from the longest step
    for length, count in rounds:
        if length > most_tokens or per_token * length * count > left:
            break
        for ticket in itertools.islice(tickets, count):
            scheduler.submit(_prompt(ticket, length, model.vocabulary))
        longest = 0.0
        while scheduler.busy:
            yield "engine"
            started = time.perf_counter()
            scheduler.step()
            seconds = time.perf_counter() - started
            left, longest = left - seconds, max(longest, seconds)
            if broken:
                raise broken[0]
        per_token = longest / (length * count)
    scheduler.cancel_all(Cancelled("the model is warm"))


def _prompt(ticket: int, length: int, vocabulary: int) -> Submit:
    """Return a prompt that shares no prefix with the others; only the first is greedy."""
    tokens = [ticket % vocabulary] * length
    sampling = Sampling() if ticket == 1 else Sampling(temperature=1.0, top_p=0.9, seed=1)
    request = GenerationRequest(
        f"warm-up {ticket}", TokenPrompt(tuple(tokens)), sampling, ignore_eos=True
    )
    return Submit(0, ticket, request, tokens, _GENERATED)
