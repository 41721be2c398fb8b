"""A load from its request to a model that can be scheduled.

`find` runs on the file thread: it resolves the reference, downloads, and looks at the files.
`read` runs on the engine thread: it is the first to import MLX, and it proves the model by
running one token through it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.engine.cache_kind import CacheKind, cache_kind
from backend.engine.disk_cache.use import cache_folder
from backend.engine.drafting.reference import find_draft
from backend.engine.embedding.kind import ModelKind, require_family, with_flags
from backend.engine.errors import EngineError, InvalidRequest, ModelRejected
from backend.engine.loading.adapters import Adapter, find_adapters
from backend.engine.loading.checkpoint import Checkpoint, inspect
from backend.engine.loading.reference import HubModel, resolve
from backend.engine.media.limits import MediaLimits, media_limits
from backend.engine.settings import Settings
from common.options import shown

if TYPE_CHECKING:
    from backend.engine.constraints.compiler import ConstraintCompiler
    from backend.engine.disk_cache.cache import DiskCache
    from backend.engine.embedding.encode_queue import EncoderModel
    from backend.engine.embedding.readers import Reader
    from backend.engine.facts import ModelFacts
    from backend.engine.load_request import LoadRequest
    from backend.engine.loading.weights import LoadedModel
    from backend.engine.model import EngineModel
    from backend.engine.prompts import PromptBuilder
    from backend.engine.vision.loading import Vision

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, adapters and a draft model that passed every check that needs no weights."""

    checkpoint: Checkpoint
    settings: Settings
    cache_kind: CacheKind
    adapters: tuple[Adapter, ...]
    draft: Checkpoint | None
    limits: MediaLimits


@dataclass(frozen=True, slots=True)
class Served:
    """What the event loop keeps of a loaded model; no MLX object is in reach from here.

    capacity: requests that may be running or waiting. default_max_tokens: for requests that set
    no limit; 0 means up to the end of the context. step_timeout: seconds. constraints: for models
    that generate text.
    reader: what the model answers besides generating.
    """

    epoch: int
    facts: ModelFacts
    prompts: PromptBuilder
    constraints: ConstraintCompiler | None
    disk: DiskCache | None
    capacity: int
    default_max_tokens: int
    step_timeout: int
    weights_bytes: int
    reader: Reader | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Both halves of a loaded model: the engine thread's and the event loop's.

    The engine thread's own is what generates, what encodes, or both.
    """

    engine: EngineModel | None
    encoder: EncoderModel | None
    served: Served


def find(request: LoadRequest, cancelled: threading.Event) -> Found:
    """Find the checkpoint. Raises ModelNotFound, ModelRejected, InvalidRequest, Cancelled."""
    settings = Settings.from_values(
        request.settings | ({"trust_remote_code": True} if request.trust_remote_code else {})
    )
    kind = cache_kind(settings, request.cache_type_key, request.cache_type_value)
    limits = media_limits(settings, request.most_images, request.most_videos, request.most_audios)
    place = resolve(
        request.model, request.model_file, request.model_path, revision=settings.revision
    )
    adapters = find_adapters(request.adapters, request.model_path, cancelled)
    if isinstance(place, HubModel):
        from backend.engine.loading.download import download

        path = download(place, settings, cancelled)
    else:
        path = place.path
    cache_folder(settings.prompt_cache_dir)
    checkpoint = _flagged(inspect(path, place.name, settings), request)
    draft = find_draft(request.draft_model, request.model_path, settings, cancelled)
    if checkpoint.media and adapters:
        raise InvalidRequest(
            "LoraAdapter is set, but adapters are not applied to vision-language models: leave it"
            " empty, or set the option type:text"
        )
    return Found(checkpoint, settings, kind, adapters, draft, limits)


def _flagged(checkpoint: Checkpoint, request: LoadRequest) -> Checkpoint:
    """The checkpoint as the kind of model that the request wants it to be."""
    kind = with_flags(
        checkpoint.kind,
        checkpoint.config,
        embeddings=request.embeddings,
        reranking=request.reranking,
    )
    if kind is not ModelKind.TEXT:
        require_family(checkpoint.name, kind, checkpoint.config)
        if request.draft_model:
            raise InvalidRequest(
                f"DraftModel is set, but the model {kind.words}: leave it empty for this model"
            )
    return replace(checkpoint, kind=kind)


def read(found: Found, request: LoadRequest, epoch: int, cancelled: threading.Event) -> Loaded:
    """Load the weights and prove the model. Raises ModelRejected, InvalidRequest, Cancelled."""
    if found.checkpoint.kind is not ModelKind.TEXT:
        from backend.engine.embedding.loading import read_encoder

        return read_encoder(found, request, epoch, cancelled)
    started = time.perf_counter()
    from backend.engine import device, kv
    from backend.engine.blas_threads import blas_threads
    from backend.engine.cache_form import use_cache_kind
    from backend.engine.chat import chat_format
    from backend.engine.constraints.compiler import ConstraintCompiler
    from backend.engine.disk_cache.cache import open_disk_cache
    from backend.engine.drafting.loading import load_drafting
    from backend.engine.embedding.loading import text_embedder
    from backend.engine.embedding.readers import Limits
    from backend.engine.facts import ModelFacts
    from backend.engine.loading.context import served_context
    from backend.engine.loading.weights import load_model
    from backend.engine.model import EngineModel
    from backend.engine.prompts import PromptBuilder
    from backend.engine.token_text import TokenTexts
    from backend.engine.tool_support import call_format

    settings = found.settings
    here = device.detect()
    device.prepare(here)
    loaded = load_model(
        found.checkpoint,
        settings,
        here,
        dtype=request.dtype,
        adapters=found.adapters,
        cancel=cancelled,
        open_model=_opener(found.checkpoint),
    )
    try:
        use_cache_kind(loaded.model, found.cache_kind)
        cost = kv.cost(loaded.model)
        vocabulary = kv.vocabulary_size(loaded.model)
        batches = kv.can_batch(kv.new_row(loaded.model))
        trims = kv.always_trims(kv.new_row(loaded.model))
        together = kv.can_prefill_together(loaded.model)
    except EngineError:
        raise
    except Exception as fault:
        _log.warning("model %s: the first token failed", shown(loaded.name), exc_info=True)
        raise ModelRejected(
            f"model {shown(loaded.name)} cannot be loaded: it failed on its first token"
            f" ({type(fault).__name__})"
        ) from None
    slots = settings.parallel if batches else 1
    context_size = served_context(loaded.context_size, request.context_size)
    drafting = load_drafting(
        found.draft,
        loaded,
        context_size,
        settings,
        here,
        dtype=request.dtype,
        cancel=cancelled,
    )
    taken = loaded.weights_bytes + (drafting.nbytes if drafting else 0)
    if found.checkpoint.media:
        taken += settings.vision_cache_mib * device.MIB
    plan = device.memory_plan(here, settings, taken)
    device.apply(plan)
    prompts = PromptBuilder(loaded.tokenizer, context_size, vocabulary, trims=trims)
    vision = _vision(found, loaded, prompts, vocabulary)
    texts = TokenTexts(loaded.tokenizer)
    engine = EngineModel(
        model=loaded.model,
        vocabulary=vocabulary,
        end_tokens=frozenset(token for token in loaded.eos_token_ids if token < vocabulary),
        new_text=texts.stream,
        cost=cost,
        slots=slots,
        batches=batches,
        trims=trims,
        together=together,
        weights_bytes=taken,
        memory_limit=plan.limit,
        prompt_cache_bytes=plan.prompt_cache,
        max_cache_entries=settings.max_cache_entries,
        prefill_chunk=device.prefill_chunk(here, settings),
        stall_ms=settings.stall_ms,
        drafting=drafting,
        disk=open_disk_cache(
            loaded.model,
            found.checkpoint.path,
            settings,
            dtype=loaded.arithmetic,
            kv_kind=repr(found.cache_kind),
            adapter=loaded.adapter_digest,
            copy=device.host_reads_disturb(here),
        ),
        media=vision.reader if vision else None,
        repetition_guard=settings.repetition_guard,
        blas=blas_threads() if here.kind == "cpu" else None,
    )
    format_ = chat_format(
        loaded.chat_template,
        loaded.tokenizer.get_vocab().keys(),
        settings.tool_parser,
        settings.reasoning_parser,
    )
    facts = ModelFacts(
        name=loaded.name,
        model_type=loaded.model_type,
        context_size=context_size,
        chat_template=loaded.chat_template,
        chat_format=format_,
        call_format=call_format(format_, settings.tool_parser, prompts),
        rendered_template=prompts.sample(),
        vocabulary_size=vocabulary,
        token_bytes=texts.bytes_of,
        new_text=texts.stream,
        defaults=settings.extras,
        media=vision.prompts.kinds if vision else frozenset(),
        media_marker=vision.prompts.place if vision else "",
    )
    _log.info(
        "model %s: %s on %s, %s, context %d, %d rows, weights %d MiB, loaded in %.1f s",
        shown(loaded.name),
        loaded.model_type,
        here.kind,
        loaded.arithmetic,
        context_size,
        slots,
        loaded.weights_bytes // device.MIB,
        time.perf_counter() - started,
    )
    encoder, reader = text_embedder(
        loaded, settings, here, Limits(context_size, vocabulary), plan.limit - taken
    )
    if request.embeddings and reader is None:
        raise ModelRejected(
            f"Embeddings is true, but model {shown(loaded.name)} does not show the vectors of its"
            " tokens: turn it off in the model's configuration"
        )
    return Loaded(
        engine,
        encoder,
        Served(
            epoch=epoch,
            facts=facts,
            prompts=prompts,
            constraints=ConstraintCompiler(
                loaded.tokenizer, vocabulary, engine.end_tokens, facts.format_of(tools=True)
            ),
            disk=engine.disk,
            capacity=slots + settings.max_queue,
            default_max_tokens=settings.max_tokens,
            step_timeout=device.step_timeout(here, settings),
            weights_bytes=loaded.weights_bytes + (drafting.weights_bytes if drafting else 0),
            reader=reader,
        ),
    )


def _opener(checkpoint: Checkpoint) -> Callable[[Path], tuple[Any, dict[str, Any]]] | None:
    """How weights become a model: by mlx-vlm where it sees or hears, else by mlx-lm."""
    if not checkpoint.media:
        return None
    from backend.engine.vision.loading import open_seeing_model

    return open_seeing_model


def _vision(
    found: Found, loaded: LoadedModel, prompts: PromptBuilder, vocabulary: int
) -> Vision | None:
    if not found.checkpoint.media:
        return None
    from backend.engine.vision.loading import open_vision

    return open_vision(
        loaded, found.checkpoint.path, prompts, found.settings, found.limits, vocabulary
    )
