"""Forward passes: padded rows in, float32 NumPy arrays out, one for each row.

They run on the engine thread. mlx-vlm's embedding models pool by rules of their own and ignore the
checkpoint's, so only their hidden states are used; the rest of their graph is never evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.embedding.encode_queue import Run
from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.kind import JINA_V4
from backend.engine.embedding.local_attention import gemma_states
from backend.engine.embedding.pooling_rule import PoolingRule
from backend.engine.embedding.vectors import PaddedRows, last_tokens, normalized, padded, pool

Hidden = Callable[[PaddedRows], mx.array]


def embedder(hidden: Hidden, dense: Sequence[Any], rule: PoolingRule, pad_token: int) -> Run:
    """Computes a vector (dim,) for each row, or (tokens, dim) with the pooling mode `none`."""

    def run(pieces: Sequence[Piece]) -> list[np.ndarray]:
        rows = padded(pieces, pad_token)
        vectors = hidden(rows)
        if rule.mode == "none":
            vectors = vectors.astype(mx.float32)
        else:
            vectors = pool(vectors, rows, rule.mode)
            for layer in dense:
                vectors = layer(vectors)
        if rule.normalize:
            vectors = normalized(vectors)
        outputs = _split(vectors)
        if rule.mode == "none":
            return [part[:length] for part, length in zip(outputs, rows.lengths, strict=True)]
        return outputs

    return run


def classifier(model: Any, pad_token: int) -> Run:
    """Computes a cross-encoder's score for each pair, (), between 0 and 1."""

    def run(pieces: Sequence[Piece]) -> list[np.ndarray]:
        return _split(mx.sigmoid(_logits(model, padded(pieces, pad_token))[:, 0]))

    return run


def token_classifier(model: Any, pad_token: int) -> Run:
    """Computes the label probabilities of each row, (tokens, labels)."""

    def run(pieces: Sequence[Piece]) -> list[np.ndarray]:
        rows = padded(pieces, pad_token)
        outputs = _split(mx.softmax(_logits(model, rows), axis=-1))
        return [part[:length] for part, length in zip(outputs, rows.lengths, strict=True)]

    return run


def yes_or_no(model: Any, yes: int, no: int, pad_token: int) -> Run:
    """Computes, for each prompt, the probability of "yes" against "no" as the next token, ()."""
    inner, head = inner_model(model), getattr(model, "lm_head", None)
    project = head or inner.embed_tokens.as_linear

    def run(pieces: Sequence[Piece]) -> list[np.ndarray]:
        rows = padded(pieces, pad_token)
        logits = project(last_tokens(inner(rows.ids), rows)).astype(mx.float32)
        return _split(mx.sigmoid(logits[:, yes] - logits[:, no]))

    return run


def encoder(model: Any, config: Mapping[str, Any]) -> Hidden:
    """Hidden states of an embedding model. config: its config.json."""
    if model.model_type == JINA_V4:
        return causal(model)
    if model.model_type == "gemma3_embedding":
        one_way = not config.get("use_bidirectional_attention")
        return lambda rows: gemma_states(model, rows, causal=one_way)

    def hidden(rows: PaddedRows) -> mx.array:
        output = model(rows.ids, attention_mask=rows.mask, token_type_ids=rows.segments)
        states: mx.array = output.last_hidden_state
        return states

    return hidden


def causal(model: Any) -> Hidden:
    """Hidden states of a generative model; with a causal mask, padding at the end has no effect."""
    inner = inner_model(model)

    def hidden(rows: PaddedRows) -> mx.array:
        states: mx.array = inner(rows.ids)
        return states

    return hidden


def inner_model(model: Any) -> Any:
    """The part of an mlx-lm model that returns hidden states; None if it has no such part."""
    return getattr(getattr(model, "language_model", model), "model", None)


def _logits(model: Any, rows: PaddedRows) -> mx.array:
    output = model(rows.ids, attention_mask=rows.mask, token_type_ids=rows.segments)
    logits: mx.array = output.logits
    return logits.astype(mx.float32)


def _split(values: mx.array) -> list[np.ndarray]:
    return list(np.array(values))
