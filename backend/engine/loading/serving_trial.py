"""Whether a model gives in a batch, and from stored KV, what one plain forward pass of it gives.

Most models cannot tell our caches from mlx-lm's. Those that can do not fail: they answer, and
wrongly, as where one number stands for the positions of all rows. So a load ends with a few rows
that go the way of all requests, through a scheduler of their own: one alone, its next turn from
the store, and several of different lengths that join and leave a batch, one with an image where
the model sees. What cannot be served rightly in one way is then served in another.

Only differences that matter count: rounding is told from them by what one other token in the
prompt would have changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from backend.engine import kv
from backend.engine.commands import Submit
from backend.engine.errors import EngineError
from backend.engine.events import Event, Finished, TokenLogprob
from backend.engine.gauges import Gauges
from backend.engine.loading.stages import Stages
from backend.engine.model import EngineModel
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from backend.engine.scheduler import Scheduler
from backend.engine.vision.media_plan import MediaItem, MediaPlan, Span
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.loading.weights import LoadedModel

_log = logging.getLogger(__name__)

# Logits of [tokens, vocabulary] of a prompt that begins with an item, or has none.
PlainPass = Callable[[Sequence[int], MediaItem | None], mx.array]

_FIRST, _MORE = 12, 5  # tokens of a prompt, and of the next turn's message
_ANSWER, _NEXT_ANSWER = 6, 3  # tokens
_ALTERNATIVES = 4  # tokens whose log-probabilities are compared at each place, beside the chosen
_OTHER_TOKEN = 4  # from the end of a prompt: the token that is changed to see what that changes
_OF_CHANGE, _OF_CHANGE_IN_HALF = 1 / 64, 1 / 6  # of what that changes may be rounding
# Of the largest logit, what is sure to be rounding: in float32, and in half precision its epsilons.
_ROUNDING, _EPSILONS_IN_HALF = 1e-5, 2
_WRONG = 1 / 3  # of an answer's places: at single ones an expert may be chosen by rounding


@dataclass(frozen=True, slots=True)
class _Row:
    """A request. after: steps of the round before it comes."""

    tokens: tuple[int, ...]
    answer: int = _ANSWER
    after: int = 0
    item: MediaItem | None = None


class _OutOfTimeError(Exception):
    """The trial may take no longer."""


class ServingTrial:
    """plain: what the answers are compared with. words: tokens of plain text, for prompts and
    answers. items: of each kind that the model sees or hears, one. seconds: of all steps, at most;
    a step is not cut."""

    def __init__(
        self,
        loaded: LoadedModel,
        plain: PlainPass,
        words: Sequence[int],
        items: Sequence[MediaItem],
        seconds: float,
    ) -> None:
        self._name = shown(loaded.name)
        self._plain = plain
        self._words = list(dict.fromkeys(words))
        self._items = items
        self._left = seconds
        self._fault = ""  # of the latest request that failed, for the log

    def run(self, model: EngineModel) -> Stages[bool]:
        """Change what `model` allows to what it can do; whether a row alone is right.

        Begins and ends on `engine`. What is not tried for want of time stays as it is.
        """
        seconds = self._left
        try:
            return (yield from self._run(model))
        except _OutOfTimeError:
            _log.info(
                "model %s: the load's trial was ended after its %.1f seconds", self._name, seconds
            )
        except Exception:
            _log.warning("model %s: the load's trial failed", self._name, exc_info=True)
        finally:
            mx.clear_cache()
        return True

    def _run(self, model: EngineModel) -> Stages[bool]:
        rounds = _Rounds(model, self._spend, self._failed)
        rows = [_Row(self._text(_FIRST, 1)), *(self._showing(item, 2) for item in self._items)]
        answers: list[Sequence[TokenLogprob]] = []
        right = True
        for row in rows:
            answers += yield from rounds.run([row], self._words)
            if not (yield from self._right(row, answers[-1])):
                right = False
                _log.warning(
                    "model %s: a request alone does not get what the model's forward pass gives%s",
                    self._name,
                    self._fault,
                )
        yield from self._try_company(model)
        for row, answer in zip(rows, answers, strict=True):
            if model.prompt_cache_bytes:
                yield from self._try_next_turn(model, rounds, row, answer)
        return right

    def _try_next_turn(
        self, model: EngineModel, rounds: _Rounds, row: _Row, answer: Sequence[TokenLogprob]
    ) -> Stages[None]:
        said = tuple(one.token for one in answer)
        tokens = (*row.tokens, *said, *self._text(_MORE, 3))
        turn = replace(row, tokens=tokens, answer=_NEXT_ANSWER)
        (later,) = yield from rounds.run([turn], self._words)
        if not (yield from self._right(turn, later)) and not (
            yield from self._as_alone(model, turn, later)
        ):
            model.prompt_cache_bytes = 0
            _log.warning(
                "model %s: from stored KV it does not go on rightly%s, so prompts are always read"
                " from their beginning",
                self._name,
                self._fault,
            )

    def _try_company(self, model: EngineModel) -> Stages[None]:
        if not (model.batches and model.slots > 1):
            return
        self._fault = ""
        if (yield from self._right_in_company(model)):
            return
        if model.together:
            model.together = False
            if (yield from self._right_in_company(model)):
                _log.warning(
                    "model %s: in a prefill pass that prompts share they do not get what they get"
                    " alone%s, so each is read by itself",
                    self._name,
                    self._fault,
                )
                return
        model.slots, model.batches = 1, False
        _log.warning(
            "model %s: in one batch requests do not get what they get alone%s, so they are served"
            " one at a time",
            self._name,
            self._fault,
        )

    def _right_in_company(self, model: EngineModel) -> Stages[bool]:
        """Rows that share a prefill pass, and one that joins them, and is alone in the end."""
        rows = [
            _Row(self._text(_FIRST, 4), _ANSWER + 2),
            *(self._showing(item, 6) for item in self._items),
            _Row(self._text(2 * _FIRST, 5), _ANSWER + 2),
            _Row(self._text(_FIRST // 2, 7), _ANSWER + 6, after=2),
        ]
        answers = yield from _Rounds(model, self._spend, self._failed).run(rows, self._words)
        for row, answer in zip(rows, answers, strict=True):
            if not (yield from self._right(row, answer)) and not (
                yield from self._as_alone(model, row, answer)
            ):
                return False
        return True

    def _right(self, row: _Row, answer: Sequence[TokenLogprob]) -> Stages[bool]:
        """Whether an answer is what the plain pass over prompt and answer says of it."""
        if len(answer) != row.answer:
            return False
        yield "engine"
        started = time.perf_counter()
        expected, rounding, allowed = self._expected(row, answer)
        told = mx.array([[one.logprob, *(value for _, value in one.top)] for one in answer])
        error = mx.abs(told - expected).max(axis=1)
        right = bool((error <= rounding).all().item())  # spares the pass that `allowed` takes
        if not right:
            right = cast(int, (~(error <= allowed)).sum().item()) < _WRONG * len(answer)
        self._spend(time.perf_counter() - started)
        return right

    def _as_alone(
        self, model: EngineModel, row: _Row, answer: Sequence[TokenLogprob]
    ) -> Stages[bool]:
        """Whether an answer that the plain pass does not give is nevertheless what the row gets by
        itself, so that neither company nor the store is at fault.

        Some models do not agree with themselves: mlx-lm's plamo3 sees one token more in a prompt
        than in an answer once its window is full. Compared are the tokens chosen, up to the first
        that differs.
        """
        rounds = _Rounds(model, self._spend, lambda *_: None)
        (alone,) = yield from rounds.run([replace(row, after=0)], self._words)
        if not len(answer) == len(alone) == row.answer:
            return False
        yield "engine"
        _, _, allowed = self._expected(row, alone)
        pairs = list(zip(alone, answer, cast(list[float], allowed.tolist()), strict=True))
        same = next(
            (at for at, (one, other, _) in enumerate(pairs) if one.token != other.token), len(pairs)
        )
        compared = pairs[: same + 1]
        off = sum(not abs(one.logprob - other.logprob) <= most for one, other, most in compared)
        return off < _WRONG * len(compared)

    def _expected(
        self, row: _Row, answer: Sequence[TokenLogprob]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """What the plain pass says of the tokens that an answer tells of, [answer, tokens]; which
        difference is sure to be rounding, and which may be, [answer]."""
        tokens = [*row.tokens, *(one.token for one in answer[:-1])]
        ids = mx.array([[one.token, *(token for token, _ in one.top)] for one in answer])
        expected, rounding, exact = self._of_plain(tokens, row, ids)
        at = len(row.tokens) - _OTHER_TOKEN
        tokens[at] = next(word for word in self._words if word != tokens[at])
        changed, _, _ = self._of_plain(tokens, row, ids)
        change = mx.sort(mx.abs(changed - expected).max(axis=1))[len(answer) // 2]
        share = _OF_CHANGE if exact else _OF_CHANGE_IN_HALF
        allowed = mx.maximum(change * share, rounding)
        return expected, rounding, mx.broadcast_to(allowed, (len(answer),))

    def _of_plain(
        self, tokens: Sequence[int], row: _Row, ids: mx.array
    ) -> tuple[mx.array, mx.array, bool]:
        """Log-probabilities [answer, ids] of the plain pass, how much of them is rounding, and
        whether they are of float32."""
        logits = self._plain(tokens, row.item)[len(row.tokens) - 1 :]
        own = logits.astype(mx.float32)
        values = own - mx.logsumexp(own, axis=-1, keepdims=True)
        exact = logits.dtype == mx.float32
        share = _ROUNDING if exact else _EPSILONS_IN_HALF * mx.finfo(logits.dtype).eps
        chosen = mx.take_along_axis(values, ids, axis=-1)
        return chosen, mx.abs(own).max() * share, exact

    def _spend(self, seconds: float) -> None:
        """Raises _OutOfTimeError."""
        self._left -= seconds
        if self._left < 0:
            raise _OutOfTimeError

    def _failed(self, where: str, fault: BaseException) -> None:
        _log.debug("trial: %s failed", where, exc_info=fault)
        self._fault = f" ({type(fault).__name__})"

    def _text(self, count: int, start: int) -> tuple[int, ...]:
        """Tokens that are alike at every call, and begin with another one for every start."""
        words = self._words
        return tuple(words[(start + 7 * at * at + at) % len(words)] for at in range(count))

    def _showing(self, item: MediaItem, start: int) -> _Row:
        return _Row((*item.whole, *self._text(_FIRST // 2, start)), item=item)


class _Rounds:
    """A scheduler for the rows of the trial. spend: takes the seconds of each step; may raise.

    report: takes a fault of the model.
    """

    def __init__(
        self,
        model: EngineModel,
        spend: Callable[[float], None],
        report: Callable[[str, BaseException], None],
    ) -> None:
        said: dict[int, tuple[TokenLogprob, ...]] = {}
        self._said = said
        self._spend = spend
        self._tickets = 0
        alone = replace(model, disk=None, drafting=None, repetition_guard=0)

        def take(ticket: int, what: Event | EngineError) -> None:
            # No method: the KV must go with the rounds, not wait for the garbage collector.
            if isinstance(what, Finished):
                said[ticket] = what.logprobs or ()

        self._scheduler = Scheduler(alone, take, report, Gauges())

    def run(
        self, rows: Sequence[_Row], words: Sequence[int]
    ) -> Stages[list[tuple[TokenLogprob, ...]]]:
        """What each row is answered; nothing where it failed. Ends on `engine`."""
        bias = tuple((word, 1e3) for word in words)
        first = self._tickets + 1
        waiting = sorted(enumerate(rows, first), key=lambda numbered: numbered[1].after)
        self._tickets += len(rows)
        steps = 0
        while waiting or self._scheduler.busy:
            while waiting and waiting[0][1].after <= steps:
                self._submit(*waiting.pop(0), bias)
            yield "engine"
            started = time.perf_counter()
            self._scheduler.step()
            steps += 1
            self._spend(time.perf_counter() - started)
        return [self._said.get(ticket, ()) for ticket in range(first, first + len(rows))]

    def _submit(self, ticket: int, row: _Row, bias: tuple[tuple[int, float], ...]) -> None:
        media = None
        if row.item is not None:
            media = MediaPlan(row.tokens, [Span(row.item.first, row.item)])
        request = GenerationRequest(
            f"trial {ticket}",
            TokenPrompt(row.tokens),
            Sampling(logit_bias=bias),
            ignore_eos=True,
            logprobs=_ALTERNATIVES,
        )
        self._scheduler.submit(
            Submit(0, ticket, request, list(row.tokens), row.answer, media=media)
        )


def plain_pass(model: Any) -> PlainPass:
    """Of a text model: all tokens at once, with an empty cache of mlx-lm's."""

    def run(tokens: Sequence[int], item: MediaItem | None) -> mx.array:  # noqa: ARG001, no media
        logits: mx.array = model(mx.array([list(tokens)]), cache=kv.new_row(model))
        return logits[0]

    return run
