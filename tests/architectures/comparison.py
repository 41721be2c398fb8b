"""An architecture in the engine against its own plain passes: alone, in company, in later turns.

Every answer is chosen among tokens of text, greedily, and held to what one forward pass over prompt
and answer chooses at each place; where rounding tips a choice, both tokens are right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from backend.engine import kv
from backend.engine.loading.serving_trial import ServingTrial, plain_pass
from backend.engine.loading.solitary import why_alone
from backend.engine.model import EngineModel
from backend.engine.request import Sampling
from tests.engine.loads import at_once
from tests.engine.rounds import Rounds, engine_model

TOKENS = 48  # of an answer
_WORDS = range(1, 100)
_CLOSE = 1e-3  # of the logits' range, in another order of summation
_FORGOTTEN = 5  # tokens behind the last one that must matter to the answer

_AMONG_WORDS = Sampling(logit_bias=tuple((word, 1e3) for word in _WORDS))
_log = logging.getLogger(__name__)


@dataclass
class Compared:
    """What was found. Each is true, false, or None where it does not apply.

    batched: whether it is served in batches at all. reused: whether a later turn began with KV of
    the earlier one.
    """

    alone: bool | None = None
    company: bool | None = None
    turns: bool | None = None
    reused: bool | None = None
    batched: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return all(one is not False for one in (self.alone, self.company, self.turns))


def compare(model: Any, name: str, tokens: int = TOKENS) -> Compared:
    """The model as a load would serve it, and what it answers."""
    served = engine_model(model, batches=kv.can_batch(kv.new_row(model)))
    loaded: Any = SimpleNamespace(name=name)
    words = list(_WORDS)
    at_once(ServingTrial(loaded, plain_pass(model), words, (), 600).run(served))
    if why_alone(name) or not served.batches:
        served.slots, served.batches = 1, False
    found = Compared(batched=served.slots > 1)
    prompts = [_text(20, 1), _text(33, 2), _text(11, 3)]
    rounds = Rounds(served)
    alone = []
    for ticket, prompt in enumerate(prompts, 1):
        alone += _said(rounds, {ticket: prompt}, tokens)
    found.alone = all(_right(model, *one) for one in zip(prompts, alone, strict=True))
    later = [(*prompt, *said, *_text(9, 4)) for prompt, said in zip(prompts, alone, strict=True)]
    answers = [
        answer
        for ticket, prompt in enumerate(later, 11)
        for answer in _said(rounds, {ticket: prompt}, tokens)
    ]
    found.turns = all(_right(model, *one) for one in zip(later, answers, strict=True))
    used = [rounds.heard[ticket].finished for ticket in (11, 12, 13)]
    found.reused = all(
        one is not None and one.usage.cached_tokens >= len(prompt)
        for one, prompt in zip(used, prompts, strict=True)
    )
    found.company = _right_in_company(model, served, prompts, tokens)
    found.notes += [str(fault) for fault in rounds.faults]
    return found


def _right_in_company(
    model: Any, served: EngineModel, prompts: Sequence[Sequence[int]], tokens: int
) -> bool:
    """Three at once, of which one leaves early, and one that joins then."""
    rounds = Rounds(served)
    limits = [tokens, tokens // 3, tokens]
    for ticket, (prompt, limit) in enumerate(zip(prompts, limits, strict=True), 1):
        _submit(rounds, ticket, prompt, limit)
    for _ in range(tokens // 2):
        rounds.step()
    fourth = _text(27, 5)
    _submit(rounds, 4, fourth, tokens)
    rounds.drain()
    said = [rounds.heard[ticket].tokens for ticket in (1, 2, 3, 4)]
    return [len(one) for one in said] == [*limits, tokens] and all(
        _right(model, prompt, one) for prompt, one in zip([*prompts, fourth], said, strict=True)
    )


def _said(rounds: Rounds, prompts: dict[int, Sequence[int]], tokens: int) -> list[list[int]]:
    for ticket, prompt in prompts.items():
        _submit(rounds, ticket, prompt, tokens)
    rounds.drain()
    return [rounds.heard[ticket].tokens for ticket in prompts]


def _submit(rounds: Rounds, ticket: int, prompt: Sequence[int], limit: int) -> None:
    rounds.submit(ticket, prompt, limit, sampling=_AMONG_WORDS, ignore_eos=True)


def _right(model: Any, prompt: Sequence[int], said: Sequence[int]) -> bool:
    """By one pass, or where a model does not agree with that itself, by mlx-lm's own steps."""
    if len(said) == 0:
        return False
    whole = _plain(model, [*prompt, *said[:-1]])[len(prompt) - 1 :]
    return _chosen(whole, said) or _chosen(_steps(model, prompt, said), said)


def _chosen(among: mx.array, said: Sequence[int]) -> bool:
    best = among.max(axis=1)
    chosen = mx.take_along_axis(among, mx.array(list(said))[:, None] - _WORDS[0], axis=1)[:, 0]
    spread = best - among.min(axis=1)
    return bool((best - chosen <= spread * _CLOSE).all().item())


def _steps(model: Any, prompt: Sequence[int], said: Sequence[int]) -> mx.array:
    row = kv.new_row(model)
    parts = [list(prompt), *([token] for token in said[:-1])]
    logits = [model(mx.array([part]), cache=row)[0, -1] for part in parts]
    return mx.stack(logits)[:, _WORDS[0] : _WORDS[-1] + 1].astype(mx.float32)


def sensitive(model: Any, prompt: Sequence[int]) -> bool:
    """Whether what the model chooses depends on more than the last tokens."""
    other = [*prompt[: -_FORGOTTEN - 1], prompt[-_FORGOTTEN - 1] % 90 + 1, *prompt[-_FORGOTTEN:]]
    own = _plain(model, prompt)[-1]
    change = mx.abs(own - _plain(model, other)[-1]).max()
    return bool((change > 10 * _CLOSE * mx.abs(own).max()).item())


def _plain(model: Any, tokens: Sequence[int]) -> mx.array:
    """Logits of the words, [tokens, words], of one pass with an empty cache."""
    logits: mx.array = model(mx.array([list(tokens)]), cache=kv.new_row(model))[0]
    return logits[:, _WORDS[0] : _WORDS[-1] + 1].astype(mx.float32)


def _text(count: int, start: int) -> tuple[int, ...]:
    return tuple(
        (start * 17 + 7 * at * at + 3 * at) % len(_WORDS) + _WORDS[0] for at in range(count)
    )
