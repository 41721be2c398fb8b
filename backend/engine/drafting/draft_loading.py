"""Decides how a loaded model drafts, and loads the draft model or head."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.device import Device, memory_limit, prefill_chunk
from backend.engine.drafting.batch_drafter import (
    BlockDrafter,
    DraftModel,
    HeadDrafter,
    ModelDrafter,
)
from backend.engine.drafting.drafter import Drafter, LookupDrafter
from backend.engine.drafting.heads import (
    Choices,
    Head,
    HeadError,
    block_layers,
    eagle_layers,
    hidden_size,
    open_block_head,
    open_eagle,
    read_weights,
)
from backend.engine.drafting.hidden_states import LayerStates, stored_bytes
from backend.engine.drafting.prediction_head import NoHeadError, open_head
from backend.engine.drafting.reference import naming_draft_model, own_settings
from backend.engine.errors import Converting, InvalidRequest, ModelRejected, Unusable
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.pass_cost import FirstPass, pass_cost
from backend.engine.loading.stages import Stages
from backend.engine.loading.weights import LoadedModel, bytes_of, cast, evaluate, load_model
from backend.engine.planning.pace import Pace
from backend.engine.planning.plan import CacheCost, PassCost
from backend.engine.sampling.logits_head import LogitsHead, StateSource
from backend.engine.settings import Settings
from backend.engine.units import MIB
from common.drafter_kind import DrafterKind
from common.field_names import named
from common.wording import shown

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_log = logging.getLogger(__name__)

LOOKUP = "prompt lookup"

_PAUSE = 0.25  # share of stall_ms that a draft model's prefill may add to a decode step


@dataclass(frozen=True, slots=True, eq=False)
class Drafting:
    """How a loaded model drafts."""

    most: int  # maximum number of draft tokens in a step if a request does not set NDraft
    # Creates the drafters of a batch, the cheapest first.
    new_drafters: Callable[[], Sequence[Drafter]]
    weights_bytes: int = 0  # size of the draft model's or head's weights
    # Memory of the drafter's KV and of unread hidden states; None if there are none.
    cost: CacheCost | None = None
    passes: PassCost = field(default_factory=PassCost)  # temporary memory of the drafter's passes
    # Collects hidden states for the drafter; None if it reads none.
    states: StateSource | None = None
    names: str = ""  # the drafters' names, for logs


def load_drafting(
    order: LoadOrder, main: LoadedModel, projection: LogitsHead, context_size: int, device: Device
) -> Stages[Drafting | None]:
    """Load the drafters for a model; return None if no tokens are drafted.

    Begins and ends on `engine`. If the option mtp is not set, the model's own head drafts if it can
    be used, because `DraftWidth` measures whether drafting saves time.

    Raises ModelRejected, InvalidRequest.
    """
    settings, checkpoint = order.settings, order.draft
    requested_by = {
        f"{named('DraftModel')} is set": checkpoint is not None,
        "option mtp is true": settings.mtp,
        "option prompt_lookup is true": settings.prompt_lookup,
    }
    reason = next((reason for reason, is_set in requested_by.items() if is_set), "")
    if not reason and (settings.mtp is False or order.ranks is not None):
        return None
    if checkpoint is not None and settings.mtp:
        raise InvalidRequest(
            f"{named('DraftModel')} is set and option mtp is true: either a draft model or the"
            " model's own head can draft, so leave one of them out"
        )
    if not kv.can_remove_tokens(kv.new_row(main.model)):
        if not reason:
            return None
        raise InvalidRequest(
            f"{reason}, but model {shown(main.name)} cannot remove wrong draft tokens: its layers"
            " store earlier tokens in a form that cannot be truncated; load it without drafting"
        )
    drafting: Drafting | None = None
    if checkpoint is None:
        if settings.mtp is not False and order.ranks is None:
            drafting = yield from _own_head(order, main, projection, device)
    else:

        def unfit(why: Exception) -> ModelRejected:
            return ModelRejected(
                f"drafter {shown(checkpoint.name)} cannot draft for {shown(main.name)}: {why};"
                f" name one that was trained for this model, or leave {named('DraftModel')} out"
            )

        with naming_draft_model(), Converting(unfit, HeadError):
            if checkpoint.drafter is not None:
                drafting = yield from _with_head(order, main, projection, device, checkpoint)
            else:
                drafting = yield from _draft_model(
                    order, checkpoint, main, projection.vocabulary, context_size, device
                )
    if settings.prompt_lookup:
        drafting = drafting or Drafting(settings.n_draft, list)
        others, names = drafting.new_drafters, [LOOKUP, *filter(None, [drafting.names])]
        drafting = replace(
            drafting, new_drafters=lambda: [LookupDrafter(), *others()], names=", ".join(names)
        )
    if drafting is not None:
        _log.info(
            "model %s: tokens are drafted by %s, up to %d in a step; weights: %d MiB",
            shown(main.name),
            drafting.names,
            drafting.most,
            drafting.weights_bytes // MIB,
        )
    return drafting


def _own_head(
    order: LoadOrder, main: LoadedModel, projection: LogitsHead, device: Device
) -> Stages[Drafting | None]:
    """Load the model's prediction head; return None if it has no usable head."""
    required = order.settings.mtp
    try:
        return (yield from _with_head(order, main, projection, device, order.head))
    except (HeadError, ModelRejected) as fault:
        why, missing = str(fault), isinstance(fault, NoHeadError)
    if required:
        raise InvalidRequest(
            f"option mtp is true, but model {shown(main.name)} has no head for multi-token"
            f" prediction that can be used: {why}; leave mtp out"
        )
    if not missing:
        _log.warning(
            "model %s: its head for multi-token prediction cannot be used, so it does not draft:"
            " %s",
            shown(main.name),
            why,
        )
    return None


def _open(
    order: LoadOrder,
    main: LoadedModel,
    projection: LogitsHead,
    checkpoint: Checkpoint | None,
    kind: DrafterKind,
) -> tuple[Head, Choices, StateSource]:
    """Return a head with lazy weights, its choices, and what it reads. Raises HeadError."""
    model, vocabulary = main.model, projection.vocabulary
    head: Any = None
    if checkpoint is None or kind is DrafterKind.HEAD:
        # First, because a model without a head may lack what a head needs.
        head = open_head(order.checkpoint, model, vocabulary, checkpoint)
    if kind is not DrafterKind.EAGLE3 and not projection.found:
        raise HeadError("this backend does not find this model's output projection")
    choices = Choices(projection.project, vocabulary)
    if checkpoint is None or head is not None:
        return head, choices, projection
    size = hidden_size(model, vocabulary)
    config, weights = checkpoint.config, read_weights(checkpoint.path)
    if kind is DrafterKind.EAGLE3:
        positions = eagle_layers(config, len(model.layers))
        head, choices = open_eagle(config, weights, model, size, vocabulary, projection)
    else:
        positions = block_layers(config)
        head = open_block_head(config, weights, model, size, vocabulary)
    layers = LayerStates(model, positions, size)
    if not layers.found:
        raise HeadError(
            f"it needs the states before layers {positions}, which this backend cannot read"
            f" from a model of type {main.model_type} with {len(model.layers)} layers"
        )
    return head, choices, layers


def _with_head(
    order: LoadOrder,
    main: LoadedModel,
    projection: LogitsHead,
    device: Device,
    checkpoint: Checkpoint | None,
) -> Stages[Drafting]:
    """Build a head, load its weights and measure its memory. Raises HeadError, ModelRejected."""

    def described(fault: Exception) -> HeadError:
        _log.info("the head for %s cannot be built", shown(main.name), exc_info=fault)
        kind = type(fault).__name__
        return HeadError(f"its files do not describe a head that can be built ({kind})")

    kind = (checkpoint and checkpoint.drafter) or DrafterKind.HEAD
    # What a wrong config.json or broken weights raise.
    faults = ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError
    with Converting(described, *faults, Unusable, ValueError):
        head, choices, states = _open(order, main, projection, checkpoint, kind)
        cast(head, main.dtype)
        nbytes = bytes_of(head)
        _refuse_when_full(main, nbytes, order.settings, device)
        yield from evaluate(head, nbytes)
        cost = kv.cost(head)
        passes = _passes_of(head, choices.vocabulary)
    unread = stored_bytes(head.size * getattr(mx, main.dtype).size)
    new_drafter = BlockDrafter if kind is DrafterKind.DFLASH else HeadDrafter
    return Drafting(
        order.settings.n_draft,
        lambda: [new_drafter(head, choices)],
        weights_bytes=nbytes,
        cost=replace(cost, fixed=cost.fixed + unread),
        passes=passes,
        states=states,
        names=kind.value,
    )


def _passes_of(head: Head, vocabulary: int) -> PassCost:
    """Measure the memory of a head's passes, including that of choosing all tokens of a pass."""

    def run(tokens: mx.array, cache: list[Any]) -> mx.array:
        found = head(tokens, cache=cache)
        mx.eval(found)  # a head may have a single layer, of which most comes after its KV
        return found

    found = pass_cost(run, vocabulary, FirstPass(head))
    return replace(found, per_choice=head.longest * found.per_choice)


def _refuse_when_full(main: LoadedModel, nbytes: int, settings: Settings, device: Device) -> None:
    """Raise ModelRejected if the draft model or head does not fit in memory beside the model."""
    needed, limit = main.weights_bytes + nbytes, memory_limit(device, settings)
    if needed > limit:
        raise ModelRejected.because(
            main.name,
            f"it needs {needed // MIB} MiB with its draft model or head, but MLX may use"
            f" {limit // MIB} MiB; raise memory_limit_mib, or load it without drafting",
        )


def _draft_model(
    order: LoadOrder,
    checkpoint: Checkpoint,
    main: LoadedModel,
    main_vocabulary: int,
    context_size: int,
    device: Device,
) -> Stages[Drafting]:
    settings = order.settings
    loaded = yield from load_model(
        checkpoint, own_settings(settings), device, dtype=order.request.dtype
    )
    yield "engine"
    if difference := _difference(main.tokenizer, loaded.tokenizer):
        raise ModelRejected(
            f"model {shown(loaded.name)} cannot draft for {shown(main.name)}, because their"
            f" tokenizers differ: {difference}; name a smaller model of the same family"
        )

    def broken(fault: Exception) -> ModelRejected:
        _log.warning("draft model %s: the first token failed", shown(loaded.name), exc_info=fault)
        reason = f"it failed on its first token ({type(fault).__name__})"
        return ModelRejected.because(loaded.name, reason)

    with Converting(broken, Exception):
        first = FirstPass(loaded.model)
        trims = kv.always_trims(first.row)
        cost = kv.cost(loaded.model)
        vocabulary = first.logits.shape[-1]
        head = LogitsHead(loaded.model, vocabulary, first=first.logits)
        passes = pass_cost(loaded.model, vocabulary, first, all_logits=not head.found)
    if not trims:
        raise ModelRejected.because(
            loaded.name,
            "it cannot remove wrong draft tokens: its cache has a sliding window or a recurrent"
            " state",
        )
    longest = min(loaded.context_size, context_size)
    draft = DraftModel(loaded.model, vocabulary, main_vocabulary, longest, head)
    _refuse_when_full(main, loaded.weights_bytes, settings, device)
    _log.info("draft model %s: %s, %s", shown(loaded.name), loaded.model_type, loaded.arithmetic)
    pace = Pace(prefill_chunk(device, settings), settings.stall_ms * _PAUSE)
    return Drafting(
        settings.n_draft,
        lambda: [ModelDrafter(draft, pace)],
        loaded.weights_bytes,
        cost,
        passes,
        names="draft model",
    )


def _difference(main: TokenizerWrapper, draft: TokenizerWrapper) -> str:
    """Return how two vocabularies differ; '' if they are equal.

    Added tokens, such as chat markers, may differ: families rename them between releases, and the
    only effect is a wrong draft token, which costs time.
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
        f" ({ours.get(example, 'absent')} and {theirs.get(example, 'absent')})"
    )
