"""Tries whether batching and stored KV change a model's answers.

A separate scheduler runs a few requests: one that starts alone, two of other lengths that join the
batch, one with an image if the model accepts images, and next turns that start from stored KV. The
log-probabilities of the answers are compared with a reference forward pass. All requests together
take about as long as twenty tokens.

If the model drafts, the same requests are answered again with draft tokens in every step, some
right and some wrong, so that steps that reject draft tokens are compared too.

If an answer is wrong, the same requests are tried again under stronger and stronger restrictions
(`WAYS`), until all answers are right. What could not be tried, because memory was short or a trial
failed, counts as wrong.

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
from backend.engine.engine_state import Gauges
from backend.engine.errors import EngineError, Overloaded
from backend.engine.events import Finished, GrowingText, TokenLogprob, Undelivered
from backend.engine.loading.serving_verdict import WAYS, Verdict, restrict
from backend.engine.loading.stages import Stages
from backend.engine.model import EngineModel
from backend.engine.planning.checkpoint_positions import LEAST_STORED
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from backend.engine.scheduler import Scheduler
from backend.engine.vision.media_plan import MediaItem, MediaPlan, Span
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.drafting.draft_loading import Drafting

_log = logging.getLogger(__name__)

# Computes the logits, [tokens, vocabulary], of tokens. The second argument is the image or audio
# with which the tokens begin; the third is how many of the tokens are the first prompt.
PlainPass = Callable[[Sequence[int], MediaItem | None, int], mx.array]

# Tokens of a prompt that is just long enough to be stored with its answer.
_STORED = LEAST_STORED - 5
_MORE = 4  # tokens of the next turn's message
_JOIN = 1  # steps after which the others join the first request
_SECOND_LOOK = 2  # factor on the number of answer tokens when a wrong answer is examined
# Tokens whose log-probabilities are compared at each position, besides the sampled token.
_ALTERNATIVES = 4
# Position, from the end of a prompt, of the token that is changed to see its effect.
_OTHER_TOKEN = 4
_OF_CHANGE, _OF_CHANGE_IN_HALF = 1 / 64, 1 / 6  # share of that effect that may be rounding
# Share of the largest logit that is certainly rounding: in float32, and in half precision as a
# number of epsilons.
_ROUNDING, _EPSILONS_IN_HALF = 1e-5, 2
_WRONG = 1 / 3  # share of an answer's positions at which rounding may have selected another expert
_GUESSES = 2  # draft tokens of each row in a step


@dataclass(slots=True)
class _Answer:
    """A request with its answer so far."""

    prompt: tuple[int, ...]
    limit: int  # tokens to generate
    item: MediaItem | None = None  # the image or audio at the beginning of the prompt
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failed: bool = False  # whether the model failed on this request

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token.token for token in self.logprobs)

    @property
    def complete(self) -> bool:
        return len(self.logprobs) == self.limit


@dataclass(slots=True)
class _Talk:
    """A request, and the next turn of its conversation if there is one."""

    first: _Answer
    after: int = 0  # number of steps before the request is submitted
    more: tuple[int, ...] = ()  # tokens of the next turn's message; empty if there is no next turn
    next_limit: int = 0  # tokens to generate in the next turn
    # Whether a step has passed since the answer's end, so that its KV is stored.
    waited: bool = False
    # The answers of the turns that were submitted.
    answers: list[_Answer] = field(default_factory=list)

    def submitted(self, step: int, turns: int) -> _Answer | None:
        """Return the turn to submit in this step, if there is one."""
        if not self.answers:
            return self._began(self.first) if self.after <= step else None
        if not self.unfinished(turns) or not self.answers[-1].complete:
            return None
        if not self.waited:
            self.waited = True
            return None
        prompt = (*self.first.prompt, *self.first.tokens, *self.more)
        return self._began(_Answer(prompt, self.next_limit, self.first.item))

    def unfinished(self, turns: int) -> bool:
        """Return whether another turn follows.

        turns: the maximum number of turns.
        """
        latest = self.answers[-1:]
        if not latest:
            return True
        return bool(self.more) and len(self.answers) < turns and latest[0].complete

    def _began(self, answer: _Answer) -> _Answer:
        self.answers.append(answer)
        return answer


class ServingTrial:
    """The trial of one loaded model.

    name: the model's name, for messages.
    plain: computes the reference logits.
    words: tokens of ordinary text, for prompts and answers.
    items: one item of each kind of media that the model accepts.
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
        self._fault = ""  # why the latest request failed, for the log
        self._answered: Sequence[Sequence[int]] = ()  # prompts with the answers to them

    def run(self, model: EngineModel) -> Stages[Verdict]:
        """Restrict `model` to what it does correctly, and return the verdict.

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
        """Complete the verdict by whether the answers with draft tokens are right."""
        guesser = _Recalling(self._answered, self._words)
        known = replace(drafting, most=_GUESSES, new_guessers=lambda: [guesser], cost=None)
        talks = yield from self._converse(model, self._talks(1), known)
        complete = _complete(talks)
        right = yield from self._all_right(talks, model)
        return replace(
            verdict,
            drafts=right and complete,
            complete=verdict.complete and (complete or not right),
        )

    def _run(self, model: EngineModel) -> Stages[Verdict]:
        talks = yield from self._converse(model, self._talks(1))
        self._answered = [
            (*answer.prompt, *answer.tokens) for answers in talks for answer in answers
        ]
        if (yield from self._all_right(talks, wrong=0)):
            return self._tried(talks)
        fault = self._fault
        by_itself = replace(model, **WAYS["in turn, not stored"])
        right = yield from self._all_right(
            (yield from self._converse(by_itself, self._talks(_SECOND_LOOK)))
        )
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
            talks = yield from self._converse(tried, self._talks(_SECOND_LOOK))
            if (yield from self._all_right(talks, tried)):
                break
        self._fault = fault
        return verdict

    def _tried(self, talks: Sequence[Sequence[_Answer]]) -> Verdict:
        """Return the verdict on answers without a fault.

        What could not be tried, because memory was short, is not allowed.
        """
        if _complete(talks):
            return Verdict()
        batched = all(answers[0].complete for answers in talks)
        stored = len(talks[0]) > 1 and talks[0][1].complete
        way = "not stored" if batched else "in turn" if stored else "in turn, not stored"
        return Verdict(way, complete=False)

    def _talks(self, look: int) -> list[_Talk]:
        """Return the requests of the trial.

        The first request runs alone at the beginning. Then all others join: two texts that share a
        prefill pass, and one request for each item. The first request and the items' requests have
        a next turn.

        look: a factor on the lengths of answers, and on the step at which requests join.
        """
        join, long, short = look * _JOIN, look * 5, look * 3

        def asked(item: MediaItem) -> _Talk:
            first = _Answer((*item.whole, *self._text(5, 2)), long, item)
            return _Talk(first, join, self._text(_MORE, 6), short)

        return [
            _Talk(_Answer(self._text(_STORED, 1), long), 0, self._text(_MORE, 3), short),
            _Talk(_Answer(self._text(5, 7), short), join),
            _Talk(_Answer(self._text(9, 4), long), join),
            *map(asked, self._items),
        ]

    def _converse(
        self, model: EngineModel, talks: Sequence[_Talk], drafting: Drafting | None = None
    ) -> Stages[Sequence[Sequence[_Answer]]]:
        """Run the conversations in a separate scheduler, and return the answers of each.

        drafting: proposes draft tokens for every step; None for a trial without drafting.
        """
        submitted: list[_Answer] = []

        def receive(ticket: int, event: Undelivered | EngineError) -> None:
            # Not a method: the KV must be freed with the scheduler, without the garbage collector.
            match event:
                case GrowingText():
                    submitted[ticket].logprobs += event.close().logprobs
                case Finished(logprobs=sampled):
                    submitted[ticket].logprobs = list(sampled or ())
                case Overloaded():
                    pass  # a lack of memory says nothing about the model
                case EngineError():
                    submitted[ticket].failed = True

        turns = 2 if model.prompt_cache_bytes else 1
        bias = tuple((word, 1e3) for word in self._words)
        separate = replace(model, disk=None, drafting=drafting, repetition_guard=0)
        scheduler = Scheduler(separate, receive, self._failed, Gauges())
        if drafting is not None:
            scheduler.planner.widths = _EveryStep(_GUESSES)
        step = 0
        while scheduler.busy or any(talk.unfinished(turns) for talk in talks):
            yield "engine"
            for answer in filter(None, [talk.submitted(step, turns) for talk in talks]):
                scheduler.submit(_request(len(submitted), answer, bias))
                submitted.append(answer)
            scheduler.step()
            step += 1
        return [talk.answers for talk in talks]

    def _all_right(
        self,
        talks: Sequence[Sequence[_Answer]],
        model: EngineModel | None = None,
        wrong: float = _WRONG,
    ) -> Stages[bool]:
        """Return whether all answers equal the reference.

        model: if given, an answer may also equal this model's answer to the request alone.
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
        """Return which answers equal a reference forward pass over the conversation."""
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
        """Return whether an answer equals the answer to the same prompt alone.

        If it does, neither the batch nor stored KV is at fault for the difference from the
        reference. Some models contradict themselves: mlx-lm's plamo3 attends to one token more in a
        prompt than in an answer once its window is full. The chosen tokens are compared, up to the
        first token that differs.
        """
        talk = _Talk(_Answer(answer.prompt, answer.limit, answer.item))
        ((alone,),) = yield from self._converse(model, [talk])
        if not (answer.complete and alone.complete):
            return False
        yield "engine"
        _, _, allowed = self._expected([alone])
        pairs = list(
            zip(alone.logprobs, answer.logprobs, cast(list[float], allowed.tolist()), strict=True)
        )
        same = next(
            (at for at, (own, other, _) in enumerate(pairs) if own.token != other.token), len(pairs)
        )
        compared = pairs[: same + 1]
        off = sum(not abs(own.logprob - other.logprob) <= most for own, other, most in compared)
        return off < _WRONG * len(compared)

    def _expected(self, answers: Sequence[_Answer]) -> tuple[mx.array, mx.array, mx.array]:
        """Compute the reference log-probabilities of the tokens in a conversation's answers.

        Returns the log-probabilities, [positions, tokens], and two bounds for each position:
        differences up to the first bound are certainly rounding, and differences up to the second
        bound may be rounding.
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
        """Compute reference log-probabilities, [positions, tokens].

        Also returns the size of rounding errors, and whether the model computes in float32.
        """
        positions = [
            len(answer.prompt) - 1 + at for answer in answers for at in range(len(answer.logprobs))
        ]
        sampled = [sample for answer in answers for sample in answer.logprobs]
        ids = mx.array([[sample.token, *(token for token, _ in sample.top)] for sample in sampled])
        first = answers[0]
        logits = self._plain(tokens, first.item, len(first.prompt))[mx.array(positions)]
        precise = logits.astype(mx.float32)
        values = precise - mx.logsumexp(precise, axis=-1, keepdims=True)
        exact = logits.dtype == mx.float32
        share = _ROUNDING if exact else _EPSILONS_IN_HALF * mx.finfo(logits.dtype).eps
        chosen = mx.take_along_axis(values, ids, axis=-1)
        return chosen, mx.abs(precise).max() * share, exact

    def _failed(self, where: str, fault: BaseException) -> None:
        _log.debug("trial: %s failed", where, exc_info=fault)
        self._fault = f" ({type(fault).__name__})"

    def _text(self, count: int, start: int) -> tuple[int, ...]:
        """Return tokens of ordinary text.

        Equal arguments give equal tokens; each `start` gives another first token.
        """
        words = self._words
        return tuple(words[(start + 7 * at * at + at) % len(words)] for at in range(count))


def _complete(talks: Sequence[Sequence[_Answer]]) -> bool:
    return all(answer.complete for answers in talks for answer in answers)


def _request(ticket: int, answer: _Answer, bias: tuple[tuple[int, float], ...]) -> Submit:
    """Return the command that submits a turn.

    bias: added to logits, so that only tokens of ordinary text are sampled.
    """
    media = None
    if (item := answer.item) is not None:
        media = MediaPlan(answer.prompt, [Span(item.first, item)])
    request = GenerationRequest(
        f"trial {ticket}",
        TokenPrompt(answer.prompt),
        Sampling(logit_bias=bias),
        ignore_eos=True,
        logprobs=_ALTERNATIVES,
    )
    return Submit(0, ticket, request, list(answer.prompt), answer.limit, media=media)


class _EveryStep(DraftWidth):
    """A width policy that lets every step check draft tokens, even if that saves no time."""

    def choose(self, rows: int, longest: int, most: int) -> int:  # noqa: ARG002, always as many
        return min(most, _GUESSES)


class _Recalling:
    """A `Guesser` that knows the answers.

    It alternates between one wrong draft token, and a right draft token followed by a wrong one.
    """

    nbytes = 0

    def __init__(self, texts: Sequence[Sequence[int]], words: Sequence[int]) -> None:
        self._texts = texts
        self._words = words

    def propose(self, asked: Sequence[GuessRequest]) -> list[list[int] | None]:
        return [self._guesses(tuple(request.tokens), request.most) for request in asked]

    def forget(self, sequences: Collection[int]) -> None:
        """Do nothing, because the known texts belong to no sequence."""

    def _guesses(self, tokens: Sequence[int], most: int) -> list[int]:
        known = len(tokens)
        following = next((text[known:] for text in self._texts if text[:known] == tokens), ())
        right = following[: known % _GUESSES]
        actual = following[len(right) :]
        wrong = next(word for word in self._words if word not in actual[:1])
        return [*right, wrong][:most]


def plain_pass(model: Any) -> PlainPass:
    """Return a text model's reference forward pass: all tokens at once, with an empty cache."""

    def run(
        tokens: Sequence[int],
        item: MediaItem | None,  # noqa: ARG001, no media
        prompt: int,  # noqa: ARG001, no token attends to a later one
    ) -> mx.array:
        logits: mx.array = model(mx.array([list(tokens)]), cache=kv.new_row(model))
        return logits[0]

    return run
