"""Builds an embedding, reranking or token classification model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backend.engine import device as devices
from backend.engine.device import Device
from backend.engine.embedding import networks
from backend.engine.embedding.encode_queue import ActivationCost, EncodeQueue, Run
from backend.engine.embedding.encoder_shape import family_of
from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.kind import (
    has_score,
    is_static,
    labels_of,
    module_of,
    task_adapter,
)
from backend.engine.embedding.label_reader import LabelReader
from backend.engine.embedding.network_loading import (
    applied,
    dense_layers,
    mend_text_model,
    open_network,
)
from backend.engine.embedding.readers import (
    ChatEncoder,
    EncodeRow,
    Limits,
    PairReader,
    Reader,
    TextReader,
    gemma_prompt,
    id_encoder,
    pair_encoder,
    qwen3_prompt,
    text_encoder,
)
from backend.engine.embedding.sentence_files import (
    Answers,
    Messages,
    PoolingRule,
    SentenceFiles,
    answers_of,
    messages_of,
    pooling_of_checkpoint,
    pooling_of_text_model,
    prompts_of,
    score_function,
    scores_pairs,
    sequence_limit,
)
from backend.engine.errors import Unusable
from backend.engine.loading.adapters import require_addable
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.stages import Stages
from backend.engine.loading.weights import LoadedModel, OpenModel, load_model, proving
from backend.engine.model import Built, NewQueue
from backend.engine.planning.pace import Pace
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.served_model import ServedModel
from backend.engine.settings import Settings
from backend.engine.token_text import TokenTexts
from common.context_size import served_context
from common.model_kind import ModelKind
from common.wording import shown

# Rerankers of ANSWERING_RERANKERS: model type → the words whose logits make the score, and the
# function that returns an encoder of pairs.
_ASKED: Mapping[str, tuple[tuple[str, ...], Callable[[Any, str], EncodeRow]]] = {
    "qwen3": (("yes", "no"), qwen3_prompt),
    "gemma": (("Yes",), gemma_prompt),
}


def build(order: LoadOrder) -> Stages[Built]:
    """Build a model. Begins on `files`, ends on `engine`. Raises Unusable, InvalidRequest."""
    settings, checkpoint = order.settings, order.checkpoint
    open_model, adapters = _opener(order), order.adapters
    if checkpoint.kind is ModelKind.EMBEDDING and (
        task := task_adapter(checkpoint.path, checkpoint.config, settings.task)
    ):
        adapters = (*adapters, task)
        require_addable(adapters)
    yield "engine"
    here = devices.detect()
    devices.prepare(here)
    if devices.computes_wrongly(here, checkpoint.config["model_type"]):
        reason = "MLX labels its longer texts wrongly on CUDA; load it on a machine without a GPU"
        raise Unusable(reason)
    loaded = yield from load_model(
        checkpoint,
        settings,
        here,
        dtype=order.request.dtype,
        adapters=adapters,
        open_model=open_model,
    )
    plan = devices.memory_plan(here, settings, loaded.weights_bytes)
    stated = sequence_limit(SentenceFiles(checkpoint.path), checkpoint.config)
    own_context = min(loaded.context_size, stated or loaded.context_size)
    context = served_context(own_context, order.request.context_size)
    limits = Limits(context, int(_part(loaded.config)["vocab_size"]))

    yield "files"
    compute, reader = _read_kind(checkpoint, loaded, settings, limits)
    run = networks.passes(compute, _pad_token(loaded))
    prompts = PromptBuilder(loaded.tokenizer, limits.context, limits.vocabulary)
    texts = TokenTexts(loaded.tokenizer)

    yield "engine"
    with proving(loaded.name, "text"):  # which also compiles kernels before the first request
        outputs = run([Piece([0] * length) for length in (8, 1)])
        if not all(bool(np.isfinite(output).all()) for output in outputs):
            raise Unusable("its output for a first text is not finite")
    served = ServedModel(
        name=loaded.name,
        model_type=loaded.model_type,
        context_size=limits.context,
        vocabulary_size=limits.vocabulary,
        token_bytes=texts.bytes_of,
        new_text=texts.stream,
        kind=checkpoint.kind,
        epoch=order.epoch,
        prompts=prompts,
        capacity=settings.parallel + settings.max_queue,
        step_timeout=devices.step_timeout(here, settings),
        weights_bytes=loaded.weights_bytes,
        reader=reader,
    )
    devices.apply(plan)
    return (
        None,
        _new_encoder(run, loaded, settings, here, plan.limit - loaded.weights_bytes),
        served,
    )


def text_embedder(
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    settings: Settings,
    here: Device,
    limits: Limits,
    budget: int,
) -> tuple[NewQueue, TextReader] | tuple[None, None]:
    """Return the encoder and the reader with which a generative model answers Embedding requests.

    Nothing is computed until the first request. Returns (None, None) if no part of the model
    returns hidden states (`networks.inner_model`).
    """
    if networks.inner_model(loaded.model) is None:
        return None, None
    rule = pooling_of_text_model(settings)
    hidden = networks.text_states(loaded.model, loaded.config)
    run = networks.passes(networks.embedder(hidden, rule), pad_token=0)
    encode = _id_encoder(checkpoint, loaded)
    reader = TextReader(encode, limits, per_token=rule.per_token, truncates=settings.truncate)
    return _new_encoder(run, loaded, settings, here, budget), reader


def _opener(order: LoadOrder) -> OpenModel | None:
    """Return the function that opens the model. Raises Unusable.

    Returns None for rerankers that answer with a token, because mlx-lm opens such models.
    """
    kind, config = order.checkpoint.kind, order.checkpoint.config
    files = SentenceFiles(order.checkpoint.path)
    pools = kind is ModelKind.EMBEDDING or scores_pairs(files)
    if kind is ModelKind.RERANK and not (pools or module_of(kind, config) or has_score(config)):
        return None
    dense = dense_layers(files, config) if pools else ()
    return partial(open_network, config, kind, dense)


def _read_kind(
    checkpoint: Checkpoint, loaded: LoadedModel, settings: Settings, limits: Limits
) -> tuple[networks.Compute, Reader]:
    if checkpoint.kind is ModelKind.EMBEDDING:
        return _embedding(checkpoint, loaded, settings, limits)
    if checkpoint.kind is ModelKind.RERANK:
        return _reranking(checkpoint, loaded, settings, limits)
    return networks.token_classifier(loaded.model), _label_reader(checkpoint, loaded, limits)


def _embedding(
    checkpoint: Checkpoint, loaded: LoadedModel, settings: Settings, limits: Limits
) -> tuple[networks.Compute, TextReader]:
    files, config = SentenceFiles(checkpoint.path), checkpoint.config
    rule = pooling_of_checkpoint(files, config, settings)
    transformer, prompts = files.transformer, prompts_of(files, settings)
    encode: EncodeRow
    if (messages := messages_of(transformer)) is not None:
        encode = _chat(loaded, _own_tokenizer(loaded), messages).encode_text
    elif getattr(loaded.tokenizer, "backend_tokenizer", None) is None:
        encode = _id_encoder(checkpoint, loaded)
    else:
        end = _end_token(checkpoint, loaded)
        conversion = config["model_type"] == "qwen3" and files.steps is None
        if end is None and conversion and rule.modes == ("last",):
            # Conversions of Qwen3-Embedding no longer append the end token, although it is pooled.
            stated = config.get("eos_token_id")
            end = stated if type(stated) is int else None
        encode = text_encoder(
            _own_tokenizer(loaded),
            lower=transformer.get("do_lower_case") is True,
            end_token=end,
            pools_prompt=prompts.pooled,
            special=not is_static(config),
            side=loaded.tokenizer.truncation_side,
        )
    return _pooled(checkpoint, loaded, rule), TextReader(
        encode, limits, per_token=rule.per_token, prompts=prompts, truncates=settings.truncate
    )


def _pooled(
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    rule: PoolingRule,
    score: networks.Function | None = None,
) -> networks.Compute:
    """Return what computes vectors, or with `score`, the scores of a reranker."""
    files, config = SentenceFiles(checkpoint.path), checkpoint.config
    module = module_of(checkpoint.kind, config)
    if not module and networks.inner_model(loaded.model) is None:
        raise Unusable("it does not expose the vectors of its tokens")
    hidden = networks.encoder(loaded.model, module, config)
    dense = dense_layers(files, config)
    of_tokens, of_texts = (applied(dense, loaded.model, of_tokens=early) for early in (True, False))
    return networks.embedder(hidden, rule, of_tokens, of_texts, score)


def _reranking(
    checkpoint: Checkpoint, loaded: LoadedModel, settings: Settings, limits: Limits
) -> tuple[networks.Compute, PairReader]:
    files, config = SentenceFiles(checkpoint.path), checkpoint.config
    tokenizer = _own_tokenizer(loaded)
    prompt = prompts_of(files, settings).default
    prompted: Callable[[str], EncodeRow]
    score = networks.function_of(score_function(files, config), "its score (activation_fn)")
    pools = scores_pairs(files)
    if pools or module_of(checkpoint.kind, config) or has_score(config):
        segments = "token_type_ids" in loaded.tokenizer.model_input_names
        if pools:
            rule = pooling_of_checkpoint(files, config, settings)
            compute = _pooled(checkpoint, loaded, rule, score)
        else:
            compute = networks.classifier(loaded.model, config, score)
        side = loaded.tokenizer.truncation_side
        prompted = partial(pair_encoder, tokenizer, segments, side=side)
        return compute, PairReader(prompted, limits, settings.truncate, prompt)
    model_type, compared = config["model_type"], answers_of(files)
    words, write = _ASKED.get(model_type, ((), None))
    usual = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    single = bool(words) and all(len(ids) == 1 for ids in usual)
    known = Answers(*(ids[0] for ids in usual)) if single else None
    if compared is None and words and known is None:
        raise Unusable(f"its vocabulary lacks one of the tokens {' and '.join(map(shown, words))}")
    compared = compared or known
    chat = _chat(loaded, tokenizer, messages_of(files.transformer))
    if compared is None:
        raise Unusable(
            "it has no LogitScore step, which states the tokens that make its score: use a version"
            " of it for sentence-transformers 5.4 or later"
        )
    if chat.renders_pairs:
        prompted = chat.pairs
    elif write is not None and compared == known:
        prompted = partial(write, tokenizer)
    else:
        raise Unusable(
            "its chat template does not render messages of the roles query and document, so how to"
            " ask it is unknown: use a version with the chat template of the original"
        )
    most = max(compared.yes, compared.no or 0)
    if most >= limits.vocabulary or min(compared.yes, compared.no or 0) < 0:
        raise Unusable(
            f"its LogitScore step names the token {most}, which its vocabulary does not have"
        )
    mend_text_model(loaded.model, config)
    compute = networks.answers(loaded.model, config, compared, score)
    return compute, PairReader(prompted, limits, settings.truncate, prompt)


def _id_encoder(checkpoint: Checkpoint, loaded: LoadedModel) -> EncodeRow:
    tokenizer, end = loaded.tokenizer, _end_token(checkpoint, loaded)
    special = frozenset(tokenizer.all_special_ids)
    return id_encoder(tokenizer.encode, special, end, tokenizer.truncation_side)


def _chat(loaded: LoadedModel, tokenizer: Any, messages: Messages | None) -> ChatEncoder:
    """Return the encoder of messages.

    messages: how inputs become messages; None means that contents are strings.
    """
    written = messages or Messages({}, parts=False)
    render = partial(loaded.tokenizer.apply_chat_template, tokenize=False, **written.arguments)
    return ChatEncoder(render, tokenizer, written.parts)


def _label_reader(checkpoint: Checkpoint, loaded: LoadedModel, limits: Limits) -> LabelReader:
    tokenizer, labels = _own_tokenizer(loaded), labels_of(checkpoint.config)
    if checkpoint.config["model_type"] == "openai_privacy_filter":
        path = _privacy_path(checkpoint.path, labels)
        return LabelReader(tokenizer, limits, labels, path, by_word=False)
    around = (loaded.tokenizer.cls_token_id, loaded.tokenizer.sep_token_id)
    before, after = ((), ()) if None in around else ((around[0],), (around[1],))
    return LabelReader(
        tokenizer, limits, labels, lambda shares: shares.argmax(axis=-1).tolist(), before, after
    )


def _privacy_path(path: Path, labels: tuple[str, ...]) -> Callable[[np.ndarray], list[int]]:
    """Return a decoder for the likeliest sequence of labels that BIOES allows.

    The decoder uses the transition biases of the checkpoint.
    """
    from mlx_vlm.privacy_filter import ViterbiDecoder, _load_transition_biases

    decoder = ViterbiDecoder(labels, _load_transition_biases(path, "default"))

    return lambda shares: decoder.decode(np.log(np.maximum(shares, 1e-30)))


def _new_encoder(
    run: Run, loaded: LoadedModel, settings: Settings, here: Device, budget: int
) -> NewQueue:
    part = _part(loaded.config)
    hidden = int(part.get("hidden_size") or part.get("n_embd") or part.get("dim") or 4096)
    heads = int(part.get("num_attention_heads", part.get("n_head", 16)))
    if family_of(loaded.config) == "deberta":  # each token is also compared with all distances
        heads *= 3
    itemsize = 4 if loaded.dtype == "float32" else 2
    cost = ActivationCost(heads, 16 * hidden, itemsize)
    pace = Pace(devices.encode_tokens(here, settings), settings.stall_ms)
    return partial(EncodeQueue, run, cost, pace, max(budget, 0))


def _own_tokenizer(loaded: LoadedModel) -> Any:
    """Return a copy of the tokenizers.Tokenizer, without truncation and padding.

    transformers changes the state of the original with every call, and calls come from two threads.
    """
    from tokenizers import Tokenizer

    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise Unusable("its tokenizer is not a fast one: tokenizer.json is missing")
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pad_token(loaded: LoadedModel) -> int:
    """Return the padding token. RoBERTa derives positions from it; other models accept any id."""
    for stated in (loaded.config.get("pad_token_id"), loaded.tokenizer.pad_token_id):
        if type(stated) is int and stated >= 0:
            return stated
    return 0


def _end_token(checkpoint: Checkpoint, loaded: LoadedModel) -> int | None:
    """Return the token that the tokenizer's configuration wants appended; None if there is none.

    transformers 5 ignores this setting if it has a class for the tokenizers of this model type.
    """
    stated = SentenceFiles(checkpoint.path).object("tokenizer_config.json")
    end: int | None = loaded.tokenizer.eos_token_id
    return end if stated.get("add_eos_token") is True else None


def _part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "hidden_size" in inner else config
