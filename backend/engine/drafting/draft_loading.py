"""Loads the draft model, after the model itself, and decides how a loaded model drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.device import Device, memory_limit, prefill_chunk
from backend.engine.drafting.batch_guesser import Choices
from backend.engine.drafting.block_head import BlockHead, block_places, open_block_head
from backend.engine.drafting.draft_model import DraftModel, ModelGuesser
from backend.engine.drafting.drafter import Guesser, LookupGuesser
from backend.engine.drafting.eagle_head import EagleHead, eagle_places, open_eagle
from backend.engine.drafting.head_weights import HeadError, hidden_size, read_weights
from backend.engine.drafting.layer_states import LayerStates
from backend.engine.drafting.prediction_head import PredictionHead, open_head
from backend.engine.drafting.reference import naming_draft_model, own_settings
from backend.engine.drafting.state_guesser import BlockGuesser, HeadGuesser
from backend.engine.drafting.unread_states import MOST as MOST_STATES
from backend.engine.drafting.unread_states import StateSource
from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.drafter_kind import DrafterKind
from backend.engine.loading.stages import Stages
from backend.engine.loading.weights import LoadedModel, bytes_of, cast, evaluate, load_model
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import CacheCost
from backend.engine.sampling.logits_head import LogitsHead
from backend.engine.settings import Settings
from backend.engine.units import MIB
from common.field_names import named
from common.wording import shown

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_log = logging.getLogger(__name__)

LOOKUP = "prompt lookup"

_PAUSE = 0.25  # share of stall_ms that catching up with a long prompt may add to a decode step


@dataclass(frozen=True, slots=True, eq=False)
class Drafting:
    """How a loaded model drafts.

    most: guesses at a time if a request does not set NDraft.
    new_guessers: creates the guessers of a batch, the cheapest first.
    weights_bytes: of the draft model or head.
    cost: bytes per sequence of its KV and of hidden states that wait for it; None if it has
        neither.
    states: the source of a head's hidden states; None if no guesser reads them.
    names: the guessers' names, for logs.
    """

    most: int
    new_guessers: Callable[[], Sequence[Guesser]]
    weights_bytes: int = 0
    cost: CacheCost | None = None
    states: StateSource | None = None
    names: str = LOOKUP


def load_drafting(
    checkpoint: Checkpoint | None,
    main: LoadedModel,
    own: Checkpoint,
    projection: LogitsHead,
    context_size: int,
    settings: Settings,
    device: Device,
    *,
    dtype: str = "",
) -> Stages[Drafting | None]:
    """Load the draft model or the head. Returns None if drafting is not requested.

    Begins and ends on `engine`.

    checkpoint: of the draft model.
    own: of the main model.
    context_size: tokens that the main model is served with.

    Raises ModelRejected, InvalidRequest.
    """
    requested_by = {
        f"{named('DraftModel')} is set": checkpoint is not None,
        "option mtp is true": settings.mtp,
        "option prompt_lookup is true": settings.prompt_lookup,
    }
    reason = next((reason for reason, is_set in requested_by.items() if is_set), "")
    if not reason:
        return None
    if checkpoint is not None and settings.mtp:
        raise InvalidRequest(
            f"{named('DraftModel')} is set and option mtp is true: either a draft model or the"
            " model's own head can draft, so leave one of them out"
        )
    if not kv.can_remove_tokens(kv.new_row(main.model)):
        raise InvalidRequest(
            f"{reason}, but model {shown(main.name)} cannot undo a wrong guess: its layers store"
            " earlier tokens in a form that cannot be truncated; load it without drafting"
        )
    looking = [LookupGuesser] if settings.prompt_lookup else []
    first = f"{LOOKUP}, " if looking else ""
    if settings.mtp:
        head = yield from _load_head(own, main, projection, settings, device)
        vocabulary = kv.vocabulary_size(main.model)

        choices = Choices(projection.project, vocabulary)
        size = hidden_size(main.model, vocabulary) * getattr(mx, main.dtype).size
        return _with_head(
            lambda: [*(new() for new in looking), HeadGuesser(head, choices)],
            head,
            projection,
            size,
            settings,
            f"{first}prediction head",
        )
    if checkpoint is None:
        return Drafting(settings.n_draft, lambda: [LookupGuesser()])
    if checkpoint.drafter is not None:
        with naming_draft_model():
            new_guesser, head, states, width = yield from _load_drafter(
                checkpoint, main, projection, settings, device
            )
        return _with_head(
            lambda: [*(new() for new in looking), new_guesser()],
            head,
            states,
            width * getattr(mx, main.dtype).size,
            settings,
            f"{first}{checkpoint.drafter.value}",
        )
    with naming_draft_model():
        draft = yield from _load(checkpoint, main, context_size, settings, device, dtype)
    pace = Pace(prefill_chunk(device, settings), settings.stall_ms * _PAUSE)

    def new_guessers() -> list[Guesser]:
        return [*(new() for new in looking), ModelGuesser(draft, pace)]

    return Drafting(
        settings.n_draft,
        new_guessers,
        draft.weights_bytes,
        draft.cost,
        names=f"{first}draft model",
    )


def _with_head(
    new_guessers: Callable[[], Sequence[Guesser]],
    head: Any,
    states: StateSource,
    state_bytes: int,
    settings: Settings,
    names: str,
) -> Drafting:
    """state_bytes: of the states of a token."""
    cost = kv.cost(head)
    unread = MOST_STATES * state_bytes
    return Drafting(
        settings.n_draft,
        new_guessers,
        bytes_of(head),
        replace(cost, fixed=cost.fixed + unread),
        states,
        names,
    )


def _load_drafter(
    checkpoint: Checkpoint,
    main: LoadedModel,
    projection: LogitsHead,
    settings: Settings,
    device: Device,
) -> Stages[tuple[Callable[[], Guesser], Any, LayerStates, int]]:
    """Load an EAGLE-3 or DFlash head.

    Returns a function that makes guessers, the head, the states that it reads, and their size.
    """
    model, vocabulary = main.model, kv.vocabulary_size(main.model)
    config = checkpoint.config
    head: EagleHead | BlockHead
    new_guesser: Callable[[], Guesser]
    try:
        size = hidden_size(model, vocabulary)
        weights = read_weights(checkpoint.path)
        if checkpoint.drafter is DrafterKind.EAGLE3:
            places = eagle_places(config, len(model.layers))
            eagle, choices = open_eagle(config, weights, model, size, vocabulary, projection)
            head, new_guesser = eagle, partial(HeadGuesser, eagle, choices)
        else:
            if not projection.found:
                raise HeadError("this backend does not find this model's output projection")
            places = block_places(config)
            block = open_block_head(config, weights, model, size, vocabulary)
            choices = Choices(projection.project, vocabulary)
            head, new_guesser = block, partial(BlockGuesser, block, choices)
        states = LayerStates(model, places, size)
        if not states.found:
            raise HeadError(
                f"it needs the states before layers {places}, which this backend cannot read from a"
                f" model of type {main.model_type} with {len(model.layers)} layers"
            )
    except HeadError as why:
        refusal = str(why)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as fault:
        _log.warning("drafter %s cannot be built", shown(checkpoint.name), exc_info=True)
        refusal = f"its config.json does not describe a drafter ({type(fault).__name__})"
    else:
        refusal = ""
    if refusal:
        raise ModelRejected(
            f"drafter {shown(checkpoint.name)} cannot draft for {shown(main.name)}: {refusal}; name"
            f" one that was trained for this model, or leave {named('DraftModel')} out"
        )
    cast(head, main.dtype)
    _require_room(main, bytes_of(head), settings, device)
    yield from evaluate(head, bytes_of(head))
    return new_guesser, head, states, size * len(places)


def _load_head(
    own: Checkpoint,
    main: LoadedModel,
    projection: LogitsHead,
    settings: Settings,
    device: Device,
) -> Stages[PredictionHead]:
    """The model's prediction head, cast to the model's own type."""
    try:
        if not projection.found:
            raise HeadError("this backend does not find its output projection")
        head = open_head(own, main.model, kv.vocabulary_size(main.model))
    except HeadError as why:
        raise InvalidRequest(
            f"option mtp is true, but model {shown(main.name)} has no head for multi-token"
            f" prediction that can be used: {why}; leave mtp out"
        ) from None
    cast(head, main.dtype)
    _require_room(main, bytes_of(head), settings, device)
    yield from evaluate(head, bytes_of(head))
    return head


def _require_room(main: LoadedModel, nbytes: int, settings: Settings, device: Device) -> None:
    """Raise ModelRejected if the head's weights do not fit in memory beside the model's."""
    needed, limit = main.weights_bytes + nbytes, memory_limit(device, settings)
    if needed > limit:
        raise ModelRejected.because(
            main.name,
            f"it and the head that drafts for it take {needed // MIB} MiB, but MLX may use"
            f" {limit // MIB} MiB; raise memory_limit_mib, or load it without drafting",
        )


def _load(
    checkpoint: Checkpoint,
    main: LoadedModel,
    context_size: int,
    settings: Settings,
    device: Device,
    dtype: str,
) -> Stages[DraftModel]:
    loaded = yield from load_model(checkpoint, own_settings(settings), device, dtype=dtype)
    yield "engine"
    if difference := _difference(main.tokenizer, loaded.tokenizer):
        raise ModelRejected(
            f"model {shown(loaded.name)} cannot draft for {shown(main.name)}, because their"
            f" tokenizers differ: {difference}; name a smaller model of the same family"
        )
    try:
        trims = kv.always_trims(kv.new_row(loaded.model))
        cost = kv.cost(loaded.model)
        vocabulary = kv.vocabulary_size(loaded.model)
        main_vocabulary = kv.vocabulary_size(main.model)
    except Exception as fault:
        _log.warning("draft model %s: the first token failed", shown(loaded.name), exc_info=True)
        broken = type(fault).__name__
    else:
        broken = ""
    if broken:
        raise ModelRejected.because(loaded.name, f"it failed on its first token ({broken})")
    if not trims:
        raise ModelRejected.because(
            loaded.name,
            "it cannot undo a wrong guess: its cache has a sliding window or a recurrent state",
        )
    draft = DraftModel(
        name=loaded.name,
        model=loaded.model,
        vocabulary=vocabulary,
        main_vocabulary=main_vocabulary,
        longest=min(loaded.context_size, context_size),
        weights_bytes=loaded.weights_bytes,
        cost=cost,
    )
    needed = main.weights_bytes + draft.weights_bytes
    limit = memory_limit(device, settings)
    if needed > limit:
        raise ModelRejected.because(
            loaded.name,
            f"it and the model take {needed // MIB} MiB, but MLX may use {limit // MIB} MiB; raise"
            f" memory_limit_mib, or leave {named('DraftModel')} out",
        )
    _log.info(
        "draft model %s: %s, %s, weights %d MiB",
        shown(loaded.name),
        loaded.model_type,
        loaded.arithmetic,
        loaded.weights_bytes // MIB,
    )
    return draft


def _difference(main: TokenizerWrapper, draft: TokenizerWrapper) -> str:
    """Return how two vocabularies differ; '' if they do not.

    Added tokens, such as chat markers, may differ: families rename them from one release to the
    next, and the only effect is a wrong guess, which costs time.
    """
    added = main.get_added_vocab().keys() | draft.get_added_vocab().keys()
    ours: Mapping[str, int] = main.get_vocab()
    theirs: Mapping[str, int] = draft.get_vocab()
    every = (ours.keys() | theirs.keys()) - added
    differing = [token for token in every if ours.get(token) != theirs.get(token)]
    if not differing:
        return ""
    example = min(differing, key=lambda token: (ours.get(token, len(ours)), token))
    return (
        f"{len(differing)} of {len(every)} tokens differ, such as {shown(example)}"
        f" ({_id(ours, example)} and {_id(theirs, example)})"
    )


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "absent"
