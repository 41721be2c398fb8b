"""Loads the model that a request names: finds its files, and calls the builder of its kind.

None of the imports at module level imports MLX.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from backend.engine.caching.cache_kind import cache_kind
from backend.engine.disk_cache.use import absolute_folder
from backend.engine.drafting.reference import find_draft, find_head
from backend.engine.embedding.kind import require_family, require_tasks, with_flags
from backend.engine.embedding.sentence_files import SentenceFiles, is_reranker
from backend.engine.errors import InvalidRequest, ModelRejected, NotFinite, naming
from backend.engine.load_request import LoadRequest
from backend.engine.loading.adapters import Adapter, find_adapters
from backend.engine.loading.checkpoint import Checkpoint, inspect
from backend.engine.loading.folder import readable, standard_folder
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.model_reference import HubModel, resolve
from backend.engine.loading.stages import Stages
from backend.engine.media.limits import media_limits
from backend.engine.mlx_lm_import import import_mlx_lm
from backend.engine.prompting.prompts import BrokenTemplate, CostlyPrompt
from backend.engine.prompting.quoted_text import UnreadableText, tokenizing
from backend.engine.settings import Settings
from backend.engine.units import MIB
from common.field_names import named
from common.model_kind import ModelKind
from common.wording import shown

if TYPE_CHECKING:
    from backend.engine.model import Built
    from backend.engine.ranks.leader import Leader
    from backend.engine.scheduler import Scheduler
    from backend.engine.served_model import ServedModel

_log = logging.getLogger(__name__)


def load(
    request: LoadRequest, epoch: int, cancelled: threading.Event, leader: Leader | None = None
) -> Stages[Built]:
    """Load a model. Begins on `files`, and ends on `engine`.

    leader: the connections to the other ranks, which load their parts of the model; None if this
        process serves the whole model.

    Raises ModelNotFound, ModelRejected, InvalidRequest, Cancelled, ShuttingDown if ranks do not
    join, and RankLost.
    """
    with ExitStack() as cleanup:
        order = find(request, epoch, cancelled, cleanup)
        import_mlx_lm()
        if leader is None:
            return (yield from _build(order))
        _require_divisible(order)
        timeout = order.settings.rank_timeout
        yield from leader.form(timeout, cancelled)
        try:
            leader.begin(request, epoch, timeout, cancelled)
            stages = _build(replace(order, ranks=leader))
            return (yield from leader.stages_until_refused(stages))
        except Exception as fault:
            raise leader.ended(epoch, fault) from None
        except BaseException:
            leader.abandon(epoch)
            raise


def change_adapters(
    request: LoadRequest,
    served: ServedModel,
    running: Callable[[], Scheduler],
    cancelled: threading.Event,
) -> Stages[ServedModel]:
    """Let requests choose other adapters of the loaded model. Begins on `files`.

    Running sequences keep their adapters until they end. After an error, all is as before.

    request: equals the request that loaded the model, except for the option `adapters`.
    running: returns the model's scheduler, on `engine`.

    Raises ModelNotFound, ModelRejected, InvalidRequest, Overloaded, Cancelled.
    """
    found = _choices(request, cancelled)
    _require_choosable(request, of_text=not served.media)
    yield "engine"
    from backend.engine.loading.row_adapters import choose_among, no_adapters

    scheduler = running()
    model = scheduler.model
    model.adapters = model.adapters or no_adapters(model.model)
    yield from choose_among(found, model.model, model.adapters, scheduler.count_adapters)
    scheduler.remove_adapters()
    names = ", ".join(found) or "none"
    _log.info("model %s: requests may choose the adapters %s", shown(served.name), names)
    return replace(served, adapters=model.adapters.numbers, request=request)


def _choices(request: LoadRequest, cancelled: threading.Event) -> dict[str, Adapter]:
    return {
        name: find_adapters([wanted], request.model_path, cancelled)[0]
        for name, wanted in request.choices
    }


def _require_choosable(request: LoadRequest, *, of_text: bool) -> None:
    """Raise InvalidRequest for adapters of a model of which requests cannot choose any."""
    if request.choices and not of_text:
        raise InvalidRequest(
            "option adapters is set, but requests choose adapters only of models for text: remove"
            " it, or set the option type:text"
        )


def _build(order: LoadOrder) -> Stages[Built]:
    if order.checkpoint.kind is ModelKind.TRANSCRIBE:
        from backend.engine.speech.speech_builder import build
    elif order.checkpoint.kind is not ModelKind.TEXT:
        from backend.engine.embedding.embedding_builder import build
    elif order.checkpoint.of_vlm:
        from backend.engine.vision.vision_builder import build
    else:
        from backend.engine.loading.text_builder import build
    try:
        with tokenizing(), naming(order.checkpoint.name):
            built = yield from build(order)
    except Exception as fault:
        yield "engine"  # the thread on which the memory of the weights must be released
        if isinstance(fault, BrokenTemplate | CostlyPrompt | NotFinite | UnreadableText):
            raise ModelRejected.because(order.checkpoint.name, str(fault)) from None
        raise
    served = built[-1]
    _log.info(
        "model %s: %s, %s, context %d, weights %d MiB, loaded in %.1f s",
        shown(served.name),
        served.model_type,
        served.kind.value,
        served.context_size,
        served.weights_bytes // MIB,
        time.perf_counter() - order.started,
    )
    return built


def find(
    request: LoadRequest, epoch: int, cancelled: threading.Event, cleanup: ExitStack
) -> LoadOrder:
    """Find the files of a load, and do all checks that need only files.

    cleanup: closed by the caller at the end of the load, to remove temporary files.
    """
    settings = Settings.from_values(
        request.settings | ({"trust_remote_code": True} if request.trust_remote_code else {})
    )
    kind = cache_kind(settings, request.cache_type_key, request.cache_type_value)
    limits = media_limits(settings, request.most_images, request.most_audios, request.most_videos)
    found = resolve(
        request.model, request.model_file, request.model_path, revision=settings.revision
    )
    adapters = find_adapters(request.adapters, request.model_path, cancelled)
    choices = _choices(request, cancelled)
    if isinstance(found, HubModel):
        from backend.engine.loading.download import download

        path = download(found, settings, cancelled)
    else:
        path = found.path
    head = find_head(path, settings) if not request.draft_model.strip() else None
    with naming(found.name), readable(path):
        path = cleanup.enter_context(standard_folder(path))
    absolute_folder("prompt_cache_dir", settings.prompt_cache_dir)
    checkpoint = _flagged(inspect(path, found.name, settings), request)
    require_tasks(checkpoint.kind, checkpoint.config, settings.task)
    if settings.expert_cache_mib and checkpoint.kind is not ModelKind.TEXT:
        raise InvalidRequest(
            f"option expert_cache_mib is {settings.expert_cache_mib}, but the model"
            f" {checkpoint.kind.words}: leave it out for this model"
        )
    draft = find_draft(request.draft_model, request.model_path, settings, cancelled)
    if checkpoint.media and adapters:
        raise InvalidRequest(
            f"{named('LoraAdapter')} is set, but adapters are not applied to vision-language"
            " models: leave it empty, or set the option type:text"
        )
    of_text = checkpoint.kind is ModelKind.TEXT and not checkpoint.media
    _require_choosable(request, of_text=of_text)
    return LoadOrder(
        request, epoch, settings, checkpoint, kind, adapters, draft, limits, choices, head=head
    )


def _flagged(checkpoint: Checkpoint, request: LoadRequest) -> Checkpoint:
    """Return the checkpoint with the kind of model that the request asks for."""
    kind = checkpoint.kind
    if kind is ModelKind.EMBEDDING and is_reranker(SentenceFiles(checkpoint.path)):
        kind = ModelKind.RERANK
    kind = with_flags(
        kind,
        checkpoint.config,
        embeddings=request.embeddings,
        reranking=request.reranking,
    )
    if kind is not ModelKind.TEXT:
        with naming(checkpoint.name):
            require_family(kind, checkpoint.config)
        if request.draft_model:
            raise InvalidRequest(
                f"{named('DraftModel')} is set, but the model {kind.words}: leave it empty for"
                " this model"
            )
    return replace(checkpoint, kind=kind)


def _require_divisible(order: LoadOrder) -> None:
    """Raise InvalidRequest or ModelRejected if several ranks cannot serve this load."""
    checkpoint, settings, request = order.checkpoint, order.settings, order.request
    if checkpoint.kind is not ModelKind.TEXT or request.embeddings or request.reranking:
        raise ModelRejected.because(
            checkpoint.name,
            "only models that generate text are divided among ranks: serve it with one rank",
        )
    if checkpoint.of_vlm:
        raise ModelRejected.because(
            checkpoint.name,
            "models that mlx-vlm builds are not divided among ranks; to serve the text part of"
            " one that mlx-lm knows, set the option type:text",
        )
    for given, words in (
        (order.adapters, f"{named('LoraAdapter')} is set, but adapters are not applied"),
        (order.choices, "option adapters is set, but adapters are not applied"),
        (order.draft, f"{named('DraftModel')} is set, but no tokens are drafted"),
        (settings.prompt_lookup, "prompt_lookup is set, but no tokens are drafted"),
        (settings.mtp, "mtp is set, but no tokens are drafted"),
        (settings.expert_cache_mib, "expert_cache_mib is set, but all experts are in memory"),
        (settings.prompt_cache_dir, "prompt_cache_dir is set, but no KV is stored on disk"),
    ):
        if given:
            raise InvalidRequest(
                f"{words} where ranks divide the model: leave it out, or serve it with one rank"
            )
