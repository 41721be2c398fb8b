"""An architecture in the engine against its own plain passes: alone, in a batch, in later turns.

Answers are greedy, limited to text tokens, and compared with the best token at each position of one
forward pass over prompt and answer; where two tokens are equal but for rounding, both are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.loading.serving_trial import ServingTrial, reference_pass
from backend.engine.model import EngineModel
from backend.engine.request import Sampling
from tests.engine.loads import at_once
from tests.engine.rounds import Rounds, engine_model
from tests.long import TEST_LONG

TOKENS = 48 if TEST_LONG else 20  # tokens of an answer; the windows have 24
_WORDS = range(1, 100)
_CLOSE = 1e-3  # relative to the range of the logits: another order of summation
_OPENING = 4  # tokens of a prompt that open the answer
_FEW = 8  # tokens of other answers
_LATER = 12  # tokens of the second turn's answer, which depends on all of the first turn's KV
_FORGOTTEN = 5  # latest tokens; an answer must depend on one before them

_AMONG_WORDS = Sampling(logit_bias=tuple((word, 1e3) for word in _WORDS))


@dataclass(frozen=True)
class Compared:
    """The results for a model: whether its answers are right, and which KV is reused.

    way: the trial's verdict. batched: whether it is served in batches; otherwise the requests of
    `batch` run one at a time. reused: a later turn starts from the KV of the earlier one, although
    the template drops the text that opened the answer. kept: so does a repeated prompt whose first
    request was cancelled during prefill.
    """

    way: str
    batched: bool
    alone: bool
    batch: bool
    turns: bool
    reused: bool
    kept: bool

    @property
    def right(self) -> bool:
        return self.alone and self.batch and self.turns and self.reused and self.kept


def compare(model: Any, name: str, tokens: int = TOKENS) -> Compared:
    """Load the model as the backend would, and compare its answers."""
    served = engine_model(model, batches=kv.can_batch(kv.new_row(model)))
    verdict = at_once(ServingTrial(name, reference_pass(model), list(_WORDS), ()).run(served))
    if not served.batches:
        served.slots, served.batches = 1, False
    prompts = [_text(20, 1), _text(33, 2), _text(11, 3)]
    rounds = Rounds(served)
    alone = [_answers(rounds, at, prompt, tokens) for at, prompt in enumerate(prompts)]
    later = [
        (*prompt, *answer, *_text(9, 4)) for prompt, answer in zip(prompts, alone, strict=True)
    ]
    answers = [_answers(rounds, at, prompt, _LATER) for at, prompt in enumerate(later, 10)]
    return Compared(
        way=verdict.way,
        batched=served.slots > 1,
        alone=_all_right(model, prompts, alone),
        batch=_right_in_batch(model, served, prompts, tokens),
        turns=_all_right(model, later, answers)
        and all(_cached(rounds, at) >= len(prompt) for at, prompt in enumerate(prompts, 10)),
        reused=_reuses_a_turn(model, served),
        kept=_keeps_a_cancelled_prompt(model, served),
    )


def _reuses_a_turn(model: Any, served: EngineModel) -> bool:
    """Whether a later turn reuses the first one's KV and both are answered correctly.

    The later prompt lacks the first prompt's last tokens, which opened its answer."""
    rounds = Rounds(served)
    prompt = _text(60, 6)
    stays = len(prompt) - _OPENING
    first = _answers(rounds, 1, prompt, _FEW, places=(stays,))
    following = (*prompt[:stays], *first, *_text(9, 7))
    second = _answers(rounds, 2, following, _FEW)
    return _all_right(model, [prompt, following], [first, second]) and _cached(rounds, 2) >= stays


def _keeps_a_cancelled_prompt(model: Any, served: EngineModel) -> bool:
    rounds = Rounds(served)
    prompt = _text(200, 8)
    _submit(rounds, 1, prompt, _FEW)
    rounds.step()
    while rounds.scheduler.planner.sequences.by_number[1].filled < len(prompt) // 2:
        rounds.step()
    rounds.scheduler.cancel(1)
    rounds.drain()
    answer = _answers(rounds, 2, prompt, _FEW)
    return _all_right(model, [prompt], [answer]) and _cached(rounds, 2) >= len(prompt) // 4


def _right_in_batch(
    model: Any, served: EngineModel, prompts: Sequence[Sequence[int]], tokens: int
) -> bool:
    """Whether all answers are right if one of three requests ends early and a fourth joins."""
    rounds = Rounds(served)
    limits = [tokens, tokens // 3, tokens]
    for ticket, (prompt, limit) in enumerate(zip(prompts, limits, strict=True), 1):
        _submit(rounds, ticket, prompt, limit)
    for _ in range(tokens // 2):
        rounds.step()
    fourth = _text(27, 5)
    _submit(rounds, 4, fourth, tokens)
    rounds.drain()
    answer = [rounds.received[ticket].tokens for ticket in (1, 2, 3, 4)]
    whole = [len(one) for one in answer] == [*limits, tokens]
    return whole and _all_right(model, [*prompts, fourth], answer)


def _answers(
    rounds: Rounds, ticket: int, prompt: Sequence[int], tokens: int, **fields: Any
) -> list[int]:
    _submit(rounds, ticket, prompt, tokens, **fields)
    rounds.drain()
    return rounds.received[ticket].tokens


def _cached(rounds: Rounds, ticket: int) -> int:
    finished = rounds.received[ticket].finished
    return 0 if finished is None else finished.usage.cached_tokens


def _submit(rounds: Rounds, ticket: int, prompt: Sequence[int], limit: int, **fields: Any) -> None:
    rounds.submit(ticket, prompt, limit, sampling=_AMONG_WORDS, ignore_eos=True, **fields)


def _all_right(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> bool:
    return all(_right(model, *one) for one in zip(prompts, answers, strict=True))


def _right(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether the answer equals that of one pass, or that of the model's own decode steps."""
    if len(answer) == 0:
        return False
    whole = _plain(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    return _chosen(whole, answer) or _chosen(_steps(model, prompt, answer), answer)


def _chosen(among: mx.array, answer: Sequence[int]) -> bool:
    best = among.max(axis=1)
    chosen = mx.take_along_axis(among, mx.array(list(answer))[:, None] - _WORDS[0], axis=1)[:, 0]
    spread = best - among.min(axis=1)
    return bool((best - chosen <= spread * _CLOSE).all().item())


def _steps(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> mx.array:
    row = kv.new_row(model)
    parts = [list(prompt), *([token] for token in answer[:-1])]
    logits = [model(mx.array([part]), cache=row)[0, -1] for part in parts]
    return mx.stack(logits)[:, _WORDS[0] : _WORDS[-1] + 1].astype(mx.float32)


def sensitive(model: Any, prompt: Sequence[int]) -> bool:
    """Whether the model's choices depend on more than the last tokens."""
    other = [*prompt[: -_FORGOTTEN - 1], prompt[-_FORGOTTEN - 1] % 90 + 1, *prompt[-_FORGOTTEN:]]
    own = _plain(model, prompt)[-1]
    change = mx.abs(own - _plain(model, other)[-1]).max()
    return bool((change > 10 * _CLOSE * mx.abs(own).max()).item())


def _plain(model: Any, tokens: Sequence[int]) -> mx.array:
    """Logits of the text tokens, [tokens, words], from one pass with an empty cache."""
    logits: mx.array = model(mx.array([list(tokens)]), cache=kv.new_row(model))[0]
    return logits[:, _WORDS[0] : _WORDS[-1] + 1].astype(mx.float32)


def _text(count: int, start: int) -> tuple[int, ...]:
    return tuple(
        (start * 17 + 7 * at * at + 3 * at) % len(_WORDS) + _WORDS[0] for at in range(count)
    )
