"""Decides how a model may be served, so that batches and stored KV do not change its answers.

Most models give the same answers with this project's batched caches as with mlx-lm's caches. The
others raise no error but answer wrongly, for example because they use one position for all rows of
a batch.

`family_verdicts.json` has the verdicts that `make test-models` has found on a CPU. A model that has
no verdict there is tried once, during the load, and the verdict is stored with the findings of the
checkpoint.

For the trial, a separate scheduler runs a few conversations: one that starts alone, two of other
lengths that join the batch, and one with an item of each kind of media. The next turns start from
stored KV. The log-probabilities of the answers are compared with a reference forward pass. All
requests together take about as long as twenty tokens.

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
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.commands import Submit
from backend.engine.device import Device, return_buffers
from backend.engine.drafting.drafter import DraftRequest
from backend.engine.engine_state import Gauges
from backend.engine.errors import EngineError, Overloaded
from backend.engine.events import Finished, GrowingText, TokenLogprob, Undelivered
from backend.engine.loading.architectures import aliases
from backend.engine.loading.earlier_fields import in_mlx_lm
from backend.engine.loading.stages import Stages
from backend.engine.model import EngineModel
from backend.engine.planning.checkpoint_positions import LEAST_STORED
from backend.engine.planning.draft_width import DraftWidth
from backend.engine.request import GenerationRequest, Sampling, TokenPrompt
from backend.engine.scheduler import Scheduler
from backend.engine.vision.media_plan import MediaItem, MediaPlan, Span
from common.prefixes import common_prefix
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.drafting.draft_loading import Drafting
    from backend.engine.loading.load_order import LoadOrder
    from backend.engine.model import EngineModel

_log = logging.getLogger(__name__)

_ALONE: Mapping[str, Any] = {"slots": 1, "batches": False}
_NO_STORE: Mapping[str, Any] = {"prompt_cache_bytes": 0}
_MESSAGES = {
    "own passes": (
        "prompts that share a prefill pass get other answers than alone%s, so each prompt is"
        " computed by itself"
    ),
    "not stored": (
        "answers that start from stored KV are wrong%s, so every prompt is computed from its"
        " beginning"
    ),
    "in turn": (
        "requests in one batch get other answers than alone%s, so they are served one at a time"
    ),
    "in turn, not stored": (
        "requests in one batch, or from stored KV, get other answers than alone%s, so they are"
        " served one at a time, and every prompt is computed from its beginning"
    ),
}
# Restrictions, from the weakest to the strongest: fields of `EngineModel`.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "shared": {},
    "own passes": {"together": False},
    "not stored": _NO_STORE,
    "in turn": _ALONE,
    "in turn, not stored": {**_ALONE, **_NO_STORE},
}
_TABLES = json.loads(Path(__file__).with_name("family_verdicts.json").read_text())
TEXT_ON_CPU: Mapping[str, str] = _TABLES["text"]  # model type → key of `WAYS`
SEEING_ON_CPU: Mapping[str, str] = _TABLES["seeing"]
_UNTRIED = " or could not be tried"
_NOT_DRAFTING = (
    "its answers with draft tokens differ from those without%s, so it is served without drafting"
)

# Computes the logits, [tokens, vocabulary], of tokens. The second argument is the image or audio
# with which the tokens begin; the third is how many of the tokens are the first prompt.
ReferencePass = Callable[[Sequence[int], MediaItem | None, int], mx.array]
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
_DRAFTED = 2  # draft tokens of each row in a step


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial."""

    way: str = "shared"  # a key of `WAYS`
    right: bool = True  # whether a request alone gets the answer of the reference forward pass
    drafts: bool = True  # whether answers with draft tokens are right
    # Whether everything was tried; False if memory was short or the trial failed.
    complete: bool = True


def family_verdict(order: LoadOrder, device: Device, *, drafts: bool) -> Verdict | None:
    """Return the verdict on the family of a model; None if the tables do not cover this load.

    The tables were made on a CPU, with unquantised KV and without drafting.
    """
    checkpoint = order.checkpoint
    model_type = in_mlx_lm(checkpoint.config)["model_type"]
    package, table = "mlx_lm", TEXT_ON_CPU
    if checkpoint.media:
        package, table, model_type = "mlx_vlm", SEEING_ON_CPU, model_type.lower()
    elif checkpoint.of_vlm or "model_file" in checkpoint.config:
        return None
    if device.kind != "cpu" or drafts or order.ranks or order.cache_kind.quantised:
        return None
    way = table.get(aliases(package).get(model_type, model_type))
    return None if way is None else Verdict(way)


def restrict(model: EngineModel, verdict: Verdict, name: str, reason: str = "") -> None:
    """Restrict a model to what its verdict allows, and log each restriction.

    reason: a clause for the log message; '' if there is none.
    """
    reason = reason or ("" if verdict.complete else _UNTRIED)
    changes = WAYS[verdict.way]
    if any(getattr(model, field) != value for field, value in changes.items()):
        _log.warning("model %s: " + _MESSAGES[verdict.way], shown(name), reason)
        for field, value in changes.items():
            setattr(model, field, value)
    if model.drafting is not None and not verdict.drafts:
        _log.warning("model %s: " + _NOT_DRAFTING, shown(name), reason)
        model.weights_bytes -= model.drafting.weights_bytes
        model.drafting = None


@dataclass(slots=True)
class _Turn:
    """A request of a conversation, with its answer so far.

    limit: tokens to generate.
    item: the image or audio with which the prompt begins.
    more: tokens of the next turn's message; empty if there is no next turn.
    failed: whether the model failed on this request.
    """

    prompt: tuple[int, ...]
    limit: int
    item: MediaItem | None = None
    more: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failed: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token.token for token in self.logprobs)

    @property
    def complete(self) -> bool:
        return len(self.logprobs) == self.limit


_Talk = list[_Turn]  # the turns of a conversation that were submitted


class ServingTrial:
    """The trial of one loaded model.

    name: the model's name, for messages.
    reference: computes the reference logits.
    words: tokens of ordinary text, for prompts and answers.
    items: one item of each kind of media that the model accepts.
    """

    def __init__(
        self,
        name: str,
        reference: ReferencePass,
        words: Sequence[int],
        items: Sequence[MediaItem],
    ) -> None:
        self._name = name
        self._reference = reference
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
            return_buffers()
        restrict(model, verdict, self._name, self._fault)
        return verdict

    def _draft(self, model: EngineModel, drafting: Drafting, verdict: Verdict) -> Stages[Verdict]:
        """Complete the verdict by whether the answers with draft tokens are right."""
        drafter = _Recalling(self._answered, self._words)
        known = replace(drafting, most=_DRAFTED, new_drafters=lambda: [drafter], cost=None)
        talks = yield from self._converse(model, self._first_turns(1), known)
        complete = _complete(talks)
        right = yield from self._all_right(talks, model)
        return replace(
            verdict,
            drafts=right and complete,
            complete=verdict.complete and (complete or not right),
        )

    def _run(self, model: EngineModel) -> Stages[Verdict]:
        talks = yield from self._converse(model, self._first_turns(1))
        self._answered = [(*turn.prompt, *turn.tokens) for turns in talks for turn in turns]
        if (yield from self._all_right(talks, wrong=0)):
            return self._tried(talks)
        fault = self._fault
        by_itself = replace(model, **WAYS["in turn, not stored"])
        talks = yield from self._converse(by_itself, self._first_turns(_SECOND_LOOK))
        right = yield from self._all_right(talks)
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
            talks = yield from self._converse(tried, self._first_turns(_SECOND_LOOK))
            if (yield from self._all_right(talks, tried)):
                break
        self._fault = fault
        return verdict

    def _tried(self, talks: Sequence[_Talk]) -> Verdict:
        """Return the verdict on answers without a fault.

        What could not be tried, because memory was short, is not allowed.
        """
        if _complete(talks):
            return Verdict()
        batched = all(turns[0].complete for turns in talks)
        stored = len(talks[0]) > 1 and talks[0][1].complete
        way = "not stored" if batched else "in turn" if stored else "in turn, not stored"
        return Verdict(way, complete=False)

    def _first_turns(self, look: int) -> list[_Turn]:
        """Return the first requests: a text that is stored, two that share a pass, and the items.

        look: a factor on the lengths of answers.
        """
        long, short = look * 5, look * 3
        return [
            _Turn(self._text(_STORED, 1), long, more=self._text(_MORE, 3)),
            _Turn(self._text(5, 7), short),
            _Turn(self._text(9, 4), long),
            *(
                _Turn((*item.whole, *self._text(5, 2)), long, item, self._text(_MORE, 6))
                for item in self._items
            ),
        ]

    def _converse(
        self, model: EngineModel, first: Sequence[_Turn], drafting: Drafting | None = None
    ) -> Stages[list[_Talk]]:
        """Run conversations in a separate scheduler, and return their turns.

        The first request starts alone, and the others join it. When all are answered, the next
        turns start together.

        drafting: proposes draft tokens for every step; None for a trial without drafting.
        """
        submitted: list[_Turn] = []

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

        bias = tuple((word, 1e3) for word in self._words)
        separate = replace(model, disk=None, drafting=drafting, repetition_guard=0)
        scheduler = Scheduler(separate, receive, self._failed, Gauges())
        if drafting is not None:
            scheduler.planner.widths = _EveryStep(_DRAFTED)

        def submit(turns: Sequence[_Turn]) -> None:
            for turn in turns:
                scheduler.submit(_request(len(submitted), turn, bias))
                submitted.append(turn)

        submit(first[:1])
        for _ in range(_JOIN):
            yield "engine"
            scheduler.step()
        submit(first[1:])
        yield from _until_idle(scheduler)
        talks = [[turn] for turn in first]
        for talk in talks if model.prompt_cache_bytes else ():
            turn = talk[0]
            if turn.more and turn.complete:
                prompt = (*turn.prompt, *turn.tokens, *turn.more)
                talk.append(_Turn(prompt, turn.limit * 3 // 5, turn.item))
        submit([turn for talk in talks for turn in talk[1:]])
        yield from _until_idle(scheduler)
        return talks

    def _all_right(
        self, talks: Sequence[_Talk], model: EngineModel | None = None, wrong: float = _WRONG
    ) -> Stages[bool]:
        """Return whether all answers equal a reference forward pass over the conversation.

        model: if given, an answer may also equal this model's answer to the request alone.
        wrong: the share of an answer's positions that may differ.
        """
        for turns in talks:
            yield "engine"
            if any(turn.failed for turn in turns):
                return False
            for turn, off in zip(turns, self._off(turns), strict=True):
                right = off < max(wrong * len(turn.logprobs), 1)
                if not (right or (model is not None and (yield from self._as_alone(model, turn)))):
                    return False
        return True

    def _off(self, turns: _Talk) -> list[int]:
        """Return at how many positions each answer differs from the reference forward pass."""
        sampled = [sample for turn in turns for sample in turn.logprobs]
        if not sampled:
            return [0] * len(turns)
        expected, rounding, allowed = self._expected(turns)
        values = mx.array(
            [[sample.logprob, *(value for _, value in sample.top)] for sample in sampled]
        )
        error = mx.abs(values - expected).max(axis=1)
        if bool((error <= rounding).all().item()):  # saves the pass that `allowed` needs
            return [0] * len(turns)
        off = iter(cast(list[bool], (~(error <= allowed)).tolist()))
        return [sum(itertools.islice(off, len(turn.logprobs))) for turn in turns]

    def _as_alone(self, model: EngineModel, turn: _Turn) -> Stages[bool]:
        """Return whether an answer equals the answer to the same prompt alone.

        If it does, neither the batch nor stored KV is at fault for the difference from the
        reference. Some models contradict themselves: mlx-lm's plamo3 attends to one token more in a
        prompt than in an answer once its window is full. The chosen tokens are compared, up to the
        first token that differs.
        """
        ((alone,),) = yield from self._converse(model, [_Turn(turn.prompt, turn.limit, turn.item)])
        if not (turn.complete and alone.complete):
            return False
        yield "engine"
        _, _, allowed = self._expected([alone])
        same = common_prefix(alone.tokens, turn.tokens)
        compared = list(
            zip(alone.logprobs, turn.logprobs, cast(list[float], allowed.tolist()), strict=True)
        )[: same + 1]
        off = sum(not abs(own.logprob - other.logprob) <= most for own, other, most in compared)
        return off < _WRONG * len(compared)

    def _expected(self, turns: Sequence[_Turn]) -> tuple[mx.array, mx.array, mx.array]:
        """Compute the reference log-probabilities of the tokens in a conversation's answers.

        Returns the log-probabilities, [positions, tokens], and two bounds for each position:
        differences up to the first bound are certainly rounding, and differences up to the second
        bound may be rounding.
        """
        turns = [turn for turn in turns if turn.logprobs]
        tokens = [*turns[-1].prompt, *turns[-1].tokens[:-1]]
        expected, rounding, exact = self._of_reference(tokens, turns)
        for turn in turns:
            at = len(turn.prompt) - _OTHER_TOKEN
            tokens[at] = next(word for word in self._words if word != tokens[at])
        changed, _, _ = self._of_reference(tokens, turns)
        changes = mx.abs(changed - expected).max(axis=1)
        share = _OF_CHANGE if exact else _OF_CHANGE_IN_HALF
        allowed = []
        for turn in turns:
            count = len(turn.logprobs)
            change, changes = mx.sort(changes[:count])[count // 2], changes[count:]
            allowed.append(mx.broadcast_to(mx.maximum(change * share, rounding), (count,)))
        return expected, rounding, mx.concatenate(allowed)

    def _of_reference(
        self, tokens: Sequence[int], turns: Sequence[_Turn]
    ) -> tuple[mx.array, mx.array, bool]:
        """Compute reference log-probabilities, [positions, tokens].

        Also returns the size of rounding errors, and whether the model computes in float32.
        """
        first = turns[0]
        positions = [
            len(turn.prompt) - 1 + at for turn in turns for at in range(len(turn.logprobs))
        ]
        sampled = [sample for turn in turns for sample in turn.logprobs]
        ids = mx.array([[sample.token, *(token for token, _ in sample.top)] for sample in sampled])
        logits = self._reference(tokens, first.item, len(first.prompt))[mx.array(positions)]
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


def _until_idle(scheduler: Scheduler) -> Stages[None]:
    while scheduler.busy:
        yield "engine"
        scheduler.step()


def _complete(talks: Sequence[_Talk]) -> bool:
    return all(turn.complete for turns in talks for turn in turns)


def _request(ticket: int, turn: _Turn, bias: tuple[tuple[int, float], ...]) -> Submit:
    """Return the command that submits a turn.

    bias: added to logits, so that only tokens of ordinary text are sampled.
    """
    media = None
    if (item := turn.item) is not None:
        media = MediaPlan(turn.prompt, [Span(item.first, item)])
    request = GenerationRequest(
        f"trial {ticket}",
        TokenPrompt(turn.prompt),
        Sampling(logit_bias=bias),
        ignore_eos=True,
        logprobs=_ALTERNATIVES,
    )
    return Submit(0, ticket, request, list(turn.prompt), turn.limit, media=media)


class _EveryStep(DraftWidth):
    """A width policy that lets every step check draft tokens, even if that saves no time."""

    def choose(self, rows: int, longest: int, most: int) -> int:  # noqa: ARG002, always as many
        return min(most, _DRAFTED)


class _Recalling:
    """A `Drafter` that knows the answers.

    It alternates between one wrong draft token, and a right draft token followed by a wrong one.
    """

    nbytes = 0

    def __init__(self, texts: Sequence[Sequence[int]], words: Sequence[int]) -> None:
        self._texts = texts
        self._words = words

    def propose(self, asked: Sequence[DraftRequest]) -> list[list[int] | None]:
        return [self._draft(tuple(request.tokens), request.most) for request in asked]

    def forget(self, sequences: Collection[int]) -> None:
        """Do nothing, because the known texts belong to no sequence."""

    def _draft(self, tokens: Sequence[int], most: int) -> list[int]:
        known = len(tokens)
        following = next((text[known:] for text in self._texts if text[:known] == tokens), ())
        right = following[: known % _DRAFTED]
        actual = following[len(right) :]
        wrong = next(word for word in self._words if word not in actual[:1])
        return [*right, wrong][:most]


def reference_pass(model: Any) -> ReferencePass:
    """Return a text model's reference forward pass: all tokens at once, with an empty cache."""

    def run(
        tokens: Sequence[int],
        item: MediaItem | None,  # noqa: ARG001, no media
        prompt: int,  # noqa: ARG001, no token attends to a later one
    ) -> mx.array:
        logits: mx.array = model(mx.array([list(tokens)]), cache=kv.new_row(model))
        return logits[0]

    return run
