"""Tries whether batching and stored KV change a model's answers.

A few requests go through a scheduler of their own: one that starts alone, two of other lengths that
join it, one with an image for models that accept images, and next turns that start from stored KV.
Their log-probabilities are compared with a reference forward pass's. The whole conversation
costs about as much as twenty tokens.

If the model drafts, the same requests are answered once more with guesses in every step, some right
and some wrong, so that steps that take wrong guesses back are compared too.

If an answer is wrong, the same requests are tried again while less and less is shared, until all
answers are right. What could not be tried, because memory was short or a trial failed, counts as
wrong.

A difference counts as rounding if it is small compared to the change that another token in the
prompt causes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.commands import Submit
from backend.engine.drafting.drafter import GuessRequest
from backend.engine.errors import EngineError, Overloaded
from backend.engine.events import Finished, GrowingText, TokenLogprob, Undelivered
from backend.engine.gauges import Gauges
from backend.engine.loading.serving_verdict import WAYS, Verdict, restrict
from backend.engine.loading.stages import Stages
from backend.engine.model import EngineModel
from backend.engine.planning.guess_width import GuessWidth
from backend.engine.planning.snapshot_places import LEAST_STORED
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from backend.engine.scheduler import Scheduler
from backend.engine.vision.media_plan import MediaItem, MediaPlan, Span
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.drafting.draft_loading import Drafting

_log = logging.getLogger(__name__)

# Computes the logits, [tokens, vocabulary], of tokens. The second argument is the image or sound
# that they begin with, the last one how many of them are the first prompt.
PlainPass = Callable[[Sequence[int], MediaItem | None, int], mx.array]

# tokens of a prompt that is just long enough to be stored with its answer
_STORED = LEAST_STORED - 5
_MORE = 4  # tokens of the next turn's message
_JOIN = 1  # steps after which the others join the first request
_SECOND_LOOK = 2  # factor on the number of answer tokens when a wrong answer is examined
# tokens whose log-probabilities are compared at each position, besides the sampled one
_ALTERNATIVES = 4
# position, from the end of a prompt, of the token that is changed to see its effect
_OTHER_TOKEN = 4
_OF_CHANGE, _OF_CHANGE_IN_HALF = 1 / 64, 1 / 6  # share of that effect that may be rounding
# Share of the largest logit that is certainly rounding: in float32, and in half precision as a
# number of epsilons.
_ROUNDING, _EPSILONS_IN_HALF = 1e-5, 2
_WRONG = 1 / 3  # share of an answer's positions at which rounding may have selected another expert
_GUESSES = 2  # guesses of each row in a step that checks guesses


@dataclass(frozen=True, slots=True)
class _Row:
    """A request. answer: tokens to generate. after: number of steps before it is submitted.

    more: the tokens of a next message, which is submitted when the answer is complete; next_answer:
    tokens to generate then.
    """

    tokens: tuple[int, ...]
    answer: int
    after: int = 0
    item: MediaItem | None = None
    more: tuple[int, ...] = ()
    next_answer: int = 0


@dataclass(slots=True)
class _Answer:
    """A request's answer so far. failed: whether the model failed.

    left: whether a step has passed since its end, so that its KV is stored as an entry.
    """

    prompt: tuple[int, ...]
    limit: int
    item: MediaItem | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failed: bool = False
    left: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token.token for token in self.logprobs)

    @property
    def complete(self) -> bool:
        return len(self.logprobs) == self.limit


class ServingTrial:
    """The trial of one loaded model, for whose name messages have `name`.

    plain: computes the logits that the answers are compared with. words: tokens of plain text, for
    prompts and answers. items: one image or sound of each kind that the model accepts.
    """

    def __init__(
        self,
        name: str,
        plain: PlainPass,
        words: Sequence[int],
        items: Sequence[MediaItem],
    ) -> None:
        self._name = name
        self._plain = plain
        self._words = list(dict.fromkeys(words))
        self._items = items
        self._fault = ""  # of the latest request that failed, for the log
        self._answered: Sequence[Sequence[int]] = ()  # prompts with the answers to them

    def run(self, model: EngineModel) -> Stages[Verdict]:
        """Restrict `model` to what it does correctly; returns the verdict.

        Begins and ends on `engine`.
        """
        strictest = list(WAYS)[-1]
        try:
            verdict = yield from self._run(model)
            restrict(model, verdict, self._name, self._fault)
            if model.drafting is not None:
                verdict = yield from self._draft(model, model.drafting, verdict)
        except Exception:
            _log.warning("model %s: its trial failed", shown(self._name), exc_info=True)
            verdict = Verdict(strictest, drafts=False, complete=False)
        finally:
            mx.clear_cache()
        restrict(model, verdict, self._name, self._fault)
        return verdict

    def _draft(self, model: EngineModel, drafting: Drafting, verdict: Verdict) -> Stages[Verdict]:
        """The verdict, with whether the answers with guesses are right."""
        guesser = _Recalling(self._answered, self._words)
        known = replace(drafting, most=_GUESSES, new_guessers=lambda: [guesser], cost=None)
        talks = yield from self._converse(model, self._rows(1), known)
        complete = _complete(talks)
        right = yield from self._all_right(talks, model)
        return replace(
            verdict,
            drafts=right and complete,
            complete=verdict.complete and (complete or not right),
        )

    def _run(self, model: EngineModel) -> Stages[Verdict]:
        talks = yield from self._converse(model, self._rows(1))
        self._answered = [
            (*answer.prompt, *answer.tokens) for answers in talks for answer in answers
        ]
        if (yield from self._all_right(talks, wrong=0)):
            return self._tried(talks)
        fault, rows = self._fault, self._rows(_SECOND_LOOK)
        by_itself = replace(model, **WAYS["in turn, not stored"])
        right = yield from self._all_right((yield from self._converse(by_itself, rows)))
        if not right:
            _log.warning(
                "model %s: a request alone does not get the answer of a reference forward pass%s",
                shown(self._name),
                self._fault,
            )
        verdict = Verdict(right=right)
        for way, changes in WAYS.items():
            if changes and all(getattr(model, name) == value for name, value in changes.items()):
                continue
            verdict = replace(verdict, way=way)
            tried = replace(model, **changes)
            if (yield from self._all_right((yield from self._converse(tried, rows)), tried)):
                break
        self._fault = fault
        return verdict

    def _tried(self, talks: Sequence[Sequence[_Answer]]) -> Verdict:
        """The verdict on answers without a fault; what memory did not suffice for is not done."""
        if _complete(talks):
            return Verdict()
        batched = all(answers[0].complete for answers in talks)
        stored = len(talks[0]) > 1 and talks[0][1].complete
        way = "not stored" if batched else "in turn" if stored else "in turn, not stored"
        return Verdict(way, complete=False)

    def _rows(self, look: int) -> list[_Row]:
        """The requests of the trial.

        The first runs alone at the beginning. Then all others join: two texts that share a prefill
        pass, and one request for each item. The last item's conversation goes on with a next turn,
        which runs alone at the end.
        """
        join = look * _JOIN
        return [
            _Row(self._text(_STORED, 1), look * 5, more=self._text(_MORE, 3), next_answer=look * 3),
            _Row(self._text(5, 7), look * 3, join),
            _Row(self._text(9, 4), look * 5, join),
            *(
                _Row(
                    (*item.whole, *self._text(5, 2)),
                    look * 5,
                    join,
                    item,
                    more=self._text(_MORE, 6),
                    next_answer=look * 3,
                )
                for item in self._items
            ),
        ]

    def _converse(
        self,
        model: EngineModel,
        rows: Sequence[_Row],
        drafting: Drafting | None = None,
    ) -> Stages[list[list[_Answer]]]:
        """Each row's answer, and the answer of its next turn."""
        conversation = _Conversation(model, rows, self._words, self._failed, drafting)
        while conversation.unfinished:
            yield "engine"
            conversation.step()
        return conversation.answers

    def _all_right(
        self,
        talks: Sequence[Sequence[_Answer]],
        model: EngineModel | None = None,
        wrong: float = _WRONG,
    ) -> Stages[bool]:
        """Whether all answers equal the reference's or, if given, those of `model` alone.

        wrong: the share of an answer's positions that may differ.
        """
        for answers in talks:
            yield "engine"
            for answer, right in zip(answers, self._right(answers, wrong), strict=True):
                if not (
                    right or (model is not None and (yield from self._as_alone(model, answer)))
                ):
                    return False
        return True

    def _right(self, answers: Sequence[_Answer], wrong: float) -> list[bool]:
        """List which answers equal those of a reference forward pass over the conversation."""
        if any(answer.failed for answer in answers):
            return [not answer.failed for answer in answers]
        sampled = [sample for answer in answers for sample in answer.logprobs]
        if not sampled:
            return [True] * len(answers)
        expected, rounding, allowed = self._expected(answers)
        values = mx.array(
            [[sample.logprob, *(value for _, value in sample.top)] for sample in sampled]
        )
        error = mx.abs(values - expected).max(axis=1)
        if bool((error <= rounding).all().item()):  # saves the pass that `allowed` needs
            return [True] * len(answers)
        off = iter(cast(list[bool], (~(error <= allowed)).tolist()))
        return [
            sum(itertools.islice(off, len(answer.logprobs))) < max(wrong * len(answer.logprobs), 1)
            for answer in answers
        ]

    def _as_alone(self, model: EngineModel, answer: _Answer) -> Stages[bool]:
        """Whether an answer that differs from the reference equals the prompt's answer alone.

        Then neither the batch nor stored KV is at fault. Some models contradict themselves:
        mlx-lm's plamo3 attends to one token more in a prompt than in an answer once its window is
        full. The chosen tokens are compared, up to the first that differs.
        """
        row = _Row(answer.prompt, answer.limit, item=answer.item)
        ((alone,),) = yield from self._converse(model, [row])
        if not (answer.complete and alone.complete):
            return False
        yield "engine"
        _, _, allowed = self._expected([alone])
        pairs = list(
            zip(alone.logprobs, answer.logprobs, cast(list[float], allowed.tolist()), strict=True)
        )
        same = next(
            (at for at, (one, other, _) in enumerate(pairs) if one.token != other.token), len(pairs)
        )
        compared = pairs[: same + 1]
        off = sum(not abs(one.logprob - other.logprob) <= most for one, other, most in compared)
        return off < _WRONG * len(compared)

    def _expected(self, answers: Sequence[_Answer]) -> tuple[mx.array, mx.array, mx.array]:
        """Compute the reference log-probabilities of the tokens in a conversation's answers.

        [places, tokens]. Also returns two bounds for each place: differences up to the first are
        certainly rounding, and those up to the second may be.
        """
        answers = [answer for answer in answers if answer.logprobs]
        tokens = [*answers[-1].prompt, *answers[-1].tokens[:-1]]
        expected, rounding, exact = self._of_plain(tokens, answers)
        for answer in answers:
            at = len(answer.prompt) - _OTHER_TOKEN
            tokens[at] = next(word for word in self._words if word != tokens[at])
        changed, _, _ = self._of_plain(tokens, answers)
        changes = mx.abs(changed - expected).max(axis=1)
        share = _OF_CHANGE if exact else _OF_CHANGE_IN_HALF
        allowed = []
        for answer in answers:
            count = len(answer.logprobs)
            change, changes = mx.sort(changes[:count])[count // 2], changes[count:]
            allowed.append(mx.broadcast_to(mx.maximum(change * share, rounding), (count,)))
        return expected, rounding, mx.concatenate(allowed)

    def _of_plain(
        self, tokens: Sequence[int], answers: Sequence[_Answer]
    ) -> tuple[mx.array, mx.array, bool]:
        """Compute reference log-probabilities, [positions, tokens], and their rounding.

        Also returns how much of them is rounding, and whether they were computed in float32.
        """
        places = [len(one.prompt) - 1 + at for one in answers for at in range(len(one.logprobs))]
        sampled = [sample for answer in answers for sample in answer.logprobs]
        ids = mx.array([[sample.token, *(token for token, _ in sample.top)] for sample in sampled])
        first = answers[0]
        logits = self._plain(tokens, first.item, len(first.prompt))[mx.array(places)]
        own = logits.astype(mx.float32)
        values = own - mx.logsumexp(own, axis=-1, keepdims=True)
        exact = logits.dtype == mx.float32
        share = _ROUNDING if exact else _EPSILONS_IN_HALF * mx.finfo(logits.dtype).eps
        chosen = mx.take_along_axis(values, ids, axis=-1)
        return chosen, mx.abs(own).max() * share, exact

    def _failed(self, where: str, fault: BaseException) -> None:
        _log.debug("trial: %s failed", where, exc_info=fault)
        self._fault = f" ({type(fault).__name__})"

    def _text(self, count: int, start: int) -> tuple[int, ...]:
        """Tokens of plain text.

        Equal arguments give equal tokens; each `start` gives another first token.
        """
        words = self._words
        return tuple(words[(start + 7 * at * at + at) % len(words)] for at in range(count))


def _complete(talks: Sequence[Sequence[_Answer]]) -> bool:
    return all(answer.complete for answers in talks for answer in answers)


class _Conversation:
    """A scheduler for the requests of the trial, each with its next turn if prompts are stored.

    report: logs a fault of the model. drafting: guesses for every step; None: for none.
    """

    def __init__(
        self,
        model: EngineModel,
        rows: Sequence[_Row],
        words: Sequence[int],
        report: Callable[[str, BaseException], None],
        drafting: Drafting | None,
    ) -> None:
        self.answers: list[list[_Answer]] = [[] for _ in rows]
        self._rows = rows
        self._turns = 2 if model.prompt_cache_bytes else 1
        self._bias = tuple((word, 1e3) for word in words)
        self._steps = 0
        answers_by_ticket: list[_Answer] = []
        self._answers_by_ticket = answers_by_ticket

        def take(ticket: int, what: Undelivered | EngineError) -> None:
            # Not a method: the KV must be freed with the scheduler, without the garbage collector.
            match what:
                case GrowingText():
                    answers_by_ticket[ticket].logprobs += what.close().logprobs
                case Finished(logprobs=sampled):
                    answers_by_ticket[ticket].logprobs = list(sampled or ())
                case Overloaded():
                    pass  # a lack of memory says nothing about the model
                case EngineError():
                    answers_by_ticket[ticket].failed = True

        alone = replace(model, disk=None, drafting=drafting, repetition_guard=0)
        self._scheduler = Scheduler(alone, take, report, Gauges())
        if drafting is not None:
            self._scheduler.planner.widths = _EveryStep(_GUESSES)

    @property
    def unfinished(self) -> bool:
        return self._scheduler.busy or any(
            not answers or self._next_turn(row, answers)
            for row, answers in zip(self._rows, self.answers, strict=True)
        )

    def step(self) -> None:
        for row, answers in zip(self._rows, self.answers, strict=True):
            if not answers and row.after <= self._steps:
                self._ask(answers, _Answer(row.tokens, row.answer, row.item))
            elif answers and (turn := self._next_turn(row, answers)):
                if answers[-1].left:
                    self._ask(answers, _Answer(turn, row.next_answer, row.item))
                answers[-1].left = True
        self._scheduler.step()
        self._steps += 1

    def _next_turn(self, row: _Row, answers: Sequence[_Answer]) -> tuple[int, ...]:
        """The prompt of the row's next turn.

        Empty if it cannot be submitted yet, or was already.
        """
        if not row.more or len(answers) == self._turns or not answers[-1].complete:
            return ()
        return (*row.tokens, *answers[-1].tokens, *row.more)

    def _ask(self, answers: list[_Answer], answer: _Answer) -> None:
        answers.append(answer)
        ticket = len(self._answers_by_ticket)
        self._answers_by_ticket.append(answer)
        media = None
        if (item := answer.item) is not None:
            media = MediaPlan(answer.prompt, [Span(item.first, item)])
        request = GenerationRequest(
            f"trial {ticket}",
            TokenPrompt(answer.prompt),
            Sampling(logit_bias=self._bias),
            ignore_eos=True,
            logprobs=_ALTERNATIVES,
        )
        self._scheduler.submit(
            Submit(0, ticket, request, list(answer.prompt), answer.limit, media=media)
        )


class _EveryStep(GuessWidth):
    """Lets every step check guesses, even if that saves no time."""

    def choose(self, rows: int, longest: int, most: int) -> int:  # noqa: ARG002, always as many
        return min(most, _GUESSES)


class _Recalling:
    """A `Guesser` that knows the answers.

    By turns it makes a wrong guess, and a right guess followed by a wrong one.
    """

    nbytes = 0

    def __init__(self, texts: Sequence[Sequence[int]], words: Sequence[int]) -> None:
        self._texts = texts
        self._words = words

    def propose(self, asked: Sequence[GuessRequest]) -> list[list[int] | None]:
        return [self._guesses(tuple(request.tokens), request.most) for request in asked]

    def forget(self, sequences: Collection[int]) -> None:
        """Do nothing: the texts stay known."""

    def _guesses(self, tokens: Sequence[int], most: int) -> list[int]:
        known = len(tokens)
        following = next((text[known:] for text in self._texts if text[:known] == tokens), ())
        right = following[: known % _GUESSES]
        actual = following[len(right) :]
        wrong = next(word for word in self._words if word not in actual[:1])
        return [*right, wrong][:most]


def plain_pass(model: Any) -> PlainPass:
    """Compute a text model's reference: all tokens at once, with an empty cache of mlx-lm."""

    def run(
        tokens: Sequence[int],
        item: MediaItem | None,  # noqa: ARG001, no media
        prompt: int,  # noqa: ARG001, no token attends to a later one
    ) -> mx.array:
        logits: mx.array = model(mx.array([list(tokens)]), cache=kv.new_row(model))
        return logits[0]

    return run
