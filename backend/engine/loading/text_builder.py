"""Builds a model that generates text and also answers Embedding requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from backend.engine import device
from backend.engine.blas_threads import blas_threads
from backend.engine.constraints.compiler import ConstraintCompiler
from backend.engine.disk_cache.cache import open_disk_cache
from backend.engine.disk_cache.identity import model_digest
from backend.engine.drafting.draft_loading import load_drafting
from backend.engine.embedding.embedding_builder import text_embedder
from backend.engine.embedding.readers import Limits
from backend.engine.errors import ModelRejected, Unusable
from backend.engine.executing.warm_up import SHORT, warm_up
from backend.engine.loading.early_layers import only_building
from backend.engine.loading.findings import findings_of
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.recurrent_layers import use_chunks
from backend.engine.loading.row_masks import fit_row_masks
from backend.engine.loading.serving_trial import (
    ReferencePass,
    ServingTrial,
    Verdict,
    family_verdict,
    reference_pass,
    restrict,
)
from backend.engine.loading.stages import Stages
from backend.engine.loading.traits import measure, measure_passes
from backend.engine.loading.weights import (
    LoadedModel,
    OpenModel,
    load_model,
    too_large,
)
from backend.engine.model import Built, EngineModel
from backend.engine.planning.charges import longest_alone
from backend.engine.planning.pace import Pace
from backend.engine.prompting.chat_format import call_format, chat_format
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.served_model import ServedModel
from backend.engine.token_text import TokenTexts
from backend.engine.units import MIB
from common.context_size import served_context
from common.field_names import named
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.loading.row_adapters import RowAdapters
    from backend.engine.vision.media_plan import MediaItem
    from backend.engine.vision.media_prefill import MediaReader
    from backend.engine.vision.media_prompts import MediaPrompts

_log = logging.getLogger(__name__)

_LEAST_CONTEXT = 512  # tokens; if memory cannot hold them, requests are refused one by one
_FEW_WORDS = 16  # minimum; with fewer words, the vocabulary's first tokens are used instead
_WORDS = "The quick brown fox jumps over the lazy dog, and 12 boxing wizards pack my jug quickly."


@dataclass(frozen=True, slots=True)
class MediaInput:
    """A model's image and audio input.

    tried: an item of each kind of media that the model accepts, for the trial.
    end_tokens: end tokens that the model's processor names and the checkpoint does not.
    plain: the model's reference forward pass, by mlx-vlm's code.
    """

    reader: MediaReader
    prompts: MediaPrompts
    tried: Sequence[MediaItem]
    end_tokens: frozenset[int]
    plain: ReferencePass


OpenMediaInput = Callable[[LoadedModel, PromptBuilder, int], Stages[MediaInput]]


def build(
    order: LoadOrder,
    open_model: OpenModel | None = None,
    open_media_input: OpenMediaInput | None = None,
) -> Stages[Built]:
    """Build the model. Begins on `files`, ends on `engine`. Raises ModelRejected, InvalidRequest.

    open_media_input: creates the image and audio input, from the model, the builder of its prompts
        and the width of its logits; None for a model that accepts only text.
    """
    settings, request, ranks = order.settings, order.request, order.ranks
    yield "engine"
    here = device.detect()
    device.prepare(here)
    loaded = yield from load_model(
        order.checkpoint,
        settings,
        here,
        dtype=request.dtype,
        adapters=order.adapters,
        open_model=open_model,
        member=ranks.member if ranks else None,
        offloads=ranks is None,
    )
    fit_row_masks(loaded.model)
    use_chunks()
    adapters = (yield from _choices(order, loaded, here)) if order.choices else None
    yield "files"
    findings = findings_of(
        order.checkpoint.path,
        (
            *(here.kind, here.name, f"{order.checkpoint.of_vlm}"),
            # With fewer slots a pass computes in groups, and takes less memory.
            f"{loaded.experts and loaded.experts.counts.slots}",
            loaded.adapter_digest,
        ),
        dtype=loaded.arithmetic,
        kv_kind=repr(order.cache_kind),
    )
    known = findings.read() if ranks is None else {}
    yield "engine"
    blas = blas_threads(loaded.matrix_bytes) if here.kind == "cpu" else None
    traits = yield from measure(
        loaded,
        order.cache_kind,
        device.memory_limit(here, settings),
        ranks.member if ranks else None,
        known.get("figures"),
    )
    vocabulary, batches, trims = traits.vocabulary, traits.batches, traits.trims
    slots = settings.parallel if batches else 1
    stores = getattr(loaded.model, "stores", True)
    reads_whole = getattr(loaded.model, "reads_whole", False)
    if not stores:
        _log.warning("model %s: no prompt starts from stored KV", shown(loaded.name))
    own_context = loaded.context_size
    context_size = served_context(own_context, request.context_size)
    context_reason = f"configured; the model's own is {own_context}"
    drafting = yield from load_drafting(order, loaded, traits.head, context_size, here)
    taken = loaded.weights_bytes + (drafting.weights_bytes if drafting else 0)
    taken += loaded.experts.working_bytes if loaded.experts else 0
    if adapters is not None:
        taken += adapters.nbytes
        traits.passes.adapted = adapters.token_bytes
    if open_media_input is not None:
        # The processor's cache takes one half of vision_cache_mib. The other half is for features,
        # which are freed when sequences need the memory.
        taken += settings.vision_cache_mib * MIB // 2
        if taken >= (limit := device.memory_limit(here, settings)):
            raise Unusable(
                f"its weights and {settings.vision_cache_mib // 2} MiB of vision_cache_mib take"
                f" {taken // MIB} MiB, but the limit is {limit // MIB} MiB: lower"
                " vision_cache_mib, or raise memory_limit_mib",
            )
    plan = device.memory_plan(here, settings, taken)
    if ranks is not None:
        budget = min(plan.limit - taken, traits.budget)
        stored = min(plan.prompt_cache, traits.budget // 2)
        plan = replace(plan, limit=taken + budget, prompt_cache=stored)
        ranks.shards = traits.shards
    if not request.context_size:
        draft = drafting.cost if drafting else None
        budget = plan.limit - taken
        fits = longest_alone(traits.cost, traits.passes, draft, budget, own_context)
        context_size = min(own_context, max(fits, _LEAST_CONTEXT))
        context_reason = (
            f"{budget // MIB} MiB are left for KV, too few for the {own_context} tokens of the"
            " model: quantise the KV (kv_bits), or raise memory_limit_mib"
        )
    if context_size == own_context:
        context_reason = ""
    elif not request.context_size:
        _log.warning(
            "model %s: the context is %d tokens: %s",
            shown(loaded.name),
            context_size,
            context_reason,
        )

    yield "files"
    token_ids = loaded.tokenizer.get_vocab()
    prompts = PromptBuilder(
        loaded.tokenizer, context_size, vocabulary, trims=trims, token_ids=token_ids
    )
    media_input = None
    if open_media_input is not None:
        media_input = yield from open_media_input(loaded, prompts, vocabulary)
    texts = TokenTexts(loaded.tokenizer)
    format_ = chat_format(
        loaded.chat_template,
        token_ids,
        settings.tool_parser,
        settings.reasoning_parser,
        getattr(loaded.tokenizer, "response_template", None),
    )
    calls = call_format(format_, settings.tool_parser, prompts)
    ends = loaded.eos_token_ids | (media_input.end_tokens if media_input else frozenset())
    ends |= prompts.infill.ends if prompts.infill else frozenset()
    end_tokens = frozenset(token for token in ends if token < vocabulary)
    constraints = ConstraintCompiler(loaded.tokenizer, vocabulary, end_tokens, calls or format_)
    rendered = prompts.sample()
    new_encoder, reader = None, None
    if ranks is None:
        new_encoder, reader = text_embedder(
            order.checkpoint,
            loaded,
            settings,
            here,
            Limits(context_size, vocabulary),
            plan.limit - taken,
        )
    if request.embeddings and reader is None:
        raise ModelRejected(
            f"{named('Embeddings')} is true, but model {shown(loaded.name)} does not expose the"
            " vectors of its tokens: turn it off in the model's configuration"
        )

    yield "engine"
    parts = (loaded.config, loaded.config.get("text_config"))
    selects = any(isinstance(part, dict) and part.get("index_topk") for part in parts)
    prefill_chunk = device.prefill_chunk(here, settings, selects=selects)
    engine = EngineModel(
        model=loaded.model,
        head=traits.head,
        vocabulary=vocabulary,
        end_tokens=end_tokens,
        new_text=texts.stream,
        cost=traits.cost,
        passes=traits.passes,
        slots=slots,
        batches=batches,
        trims=trims,
        together=traits.together,
        reads_whole=reads_whole,
        weights_bytes=taken,
        memory_limit=plan.limit,
        prompt_cache_bytes=plan.prompt_cache if stores else 0,
        max_cache_entries=settings.max_cache_entries,
        prefill_chunk=prefill_chunk,
        pace=Pace(prefill_chunk, settings.stall_ms),
        stall_ms=settings.stall_ms,
        stream_interval_ms=settings.stream_interval_ms,
        drafting=drafting,
        experts=loaded.experts,
        media=media_input.reader if media_input else None,
        repetition_guard=settings.repetition_guard,
        blas=blas,
        leader=ranks,
        adapters=adapters,
    )
    if ranks is not None:
        from backend.engine.ranks.sharding import broadcast

        engine.broadcast = broadcast
    verdicts = known.get("verdicts", {})
    if settings.load_trial is not False:
        form, verdict = _served_form(order, engine), None
        if settings.load_trial is None:
            verdict = family_verdict(order, here, drafts=drafting is not None)
            if verdict is None and form in verdicts:
                verdict = Verdict(**verdicts[form])
        if verdict is None:
            verdict = yield from _try(order, loaded, engine, prompts, media_input)
            if verdict.complete:
                verdicts = {**verdicts, form: asdict(verdict)}
        else:
            restrict(engine, verdict, loaded.name)
        drafting = engine.drafting

    def finish() -> None:
        if traits.bounded:
            measure_passes(loaded.model, traits)
        findings.write({"figures": traits.figures, "verdicts": verdicts})

    if ranks is None and not traits.bounded:
        finish()
    most = min(device.warm_up_tokens(here, settings), context_size // 2)
    yield from warm_up(engine, most if ranks else min(most, SHORT))
    engine.later = _later(
        engine, constraints, 0 if ranks else most, finish if traits.bounded else None
    )
    yield "engine"
    if ranks is None and stores:
        with only_building():
            engine.disk = open_disk_cache(
                loaded.model,
                order.checkpoint.path,
                settings,
                dtype=loaded.arithmetic,
                kv_kind=repr(order.cache_kind),
                adapter=loaded.adapter_digest,
                device=f"{here.kind} {here.name}",
                copy=device.host_reads_disturb(here),
            )
    served = ServedModel(
        media_limits=order.media_limits,
        name=loaded.name,
        model_type=loaded.model_type,
        context_size=context_size,
        context_reason=context_reason,
        chat_template=loaded.chat_template,
        chat_format=format_,
        call_format=calls,
        template_words=prompts.known_words(),
        rendered_template=rendered,
        vocabulary_size=vocabulary,
        token_bytes=texts.bytes_of,
        new_text=texts.stream,
        defaults=settings.extras,
        media=media_input.prompts.kinds if media_input else frozenset(),
        reads_whole=reads_whole,
        media_marker=media_input.prompts.place if media_input else "",
        epoch=order.epoch,
        prompts=prompts,
        constraints=constraints,
        disk=engine.disk,
        capacity=engine.slots + settings.max_queue,
        default_max_tokens=settings.max_tokens,
        step_timeout=device.step_timeout(here, settings),
        weights_bytes=loaded.weights_bytes + (drafting.weights_bytes if drafting else 0),
        reader=reader,
        adapters=adapters.numbers if adapters else {},
        request=request,
        division=ranks.division if ranks else "",
    )
    device.apply(plan)
    return engine, new_encoder, served


def _choices(order: LoadOrder, loaded: LoadedModel, here: device.Device) -> Stages[RowAdapters]:
    """Load the adapters from which requests choose. Raises ModelRejected."""
    from backend.engine.loading.row_adapters import choose_among, no_adapters

    taken = loaded.weights_bytes + (loaded.experts.working_bytes if loaded.experts else 0)
    limit = device.memory_limit(here, order.settings)

    def reserve(nbytes: int) -> None:
        if taken + nbytes > limit:
            raise too_large(taken + nbytes, limit)

    adapters = no_adapters(loaded.model)
    yield from choose_among(order.choices, loaded.model, adapters, reserve)
    return adapters


def _try(
    order: LoadOrder,
    loaded: LoadedModel,
    engine: EngineModel,
    prompts: PromptBuilder,
    media_input: MediaInput | None,
) -> Stages[Verdict]:
    """Try how the model may be served, and restrict it to that. Raises ModelRejected."""
    plain = media_input.plain if media_input else reference_pass(loaded.model)
    if order.ranks is not None:
        plain = order.ranks.on_all_ranks(plain)
    vocabulary = engine.vocabulary
    words = {token for token in prompts.tokenize(_WORDS) if 0 <= token < vocabulary}
    if len(words) < _FEW_WORDS:
        words |= set(range(min(vocabulary, _FEW_WORDS)))
    items = media_input.tried if media_input else ()
    verdict = yield from ServingTrial(loaded.name, plain, sorted(words), items).run(engine)
    if not verdict.right and order.checkpoint.of_vlm:
        raise Unusable(
            "its answers differ from those of mlx-vlm's forward pass, so this version does not"
            " serve it",
        )
    return verdict


def _served_form(order: LoadOrder, engine: EngineModel) -> str:
    """Return the key under which a verdict is stored: all it depends on besides the checkpoint."""
    drafting, draft = engine.drafting, order.draft or order.head
    drafter = model_digest(draft.path, dtype="") if draft is not None else ""
    return (
        f"slots {engine.slots > 1}, stored {engine.prompt_cache_bytes > 0}, together"
        f" {engine.together}, drafts {drafting.names if drafting else ''} {drafter}"
    )


def _later(
    engine: EngineModel,
    constraints: ConstraintCompiler,
    most: int,
    finish: Callable[[], None] | None,
) -> Stages[None]:
    """Do the work that the first answers do not need.

    most: maximum length of a warm-up prompt; 0 where ranks divide the model, because a warm-up
        empties the executors of all ranks, while rank 0's planner still lists their cached
        prefixes.
    finish: measures what the load did not measure; None if the load measured everything.
    """
    yield "engine"
    constraints.prepare()
    if finish is not None:
        yield "engine"
        finish()
    if most:
        yield from warm_up(engine, most, begun=True)
