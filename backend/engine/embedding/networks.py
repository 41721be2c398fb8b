"""Makes forward passes over rows: pads them, runs the model, and pools the vectors of tokens.

A pass returns a float32 NumPy array for each row, and runs on the engine thread. What it computes
from the padded rows depends on the kind of the model. mlx-vlm's embedding models ignore the
checkpoint's pooling rule, so only their hidden states are used; the rest of their graph is never
evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers import activations
from mlx_lm.models.base import create_causal_mask

from backend.engine.embedding.encode_queue import Run
from backend.engine.embedding.encoder import attention_masks
from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.kind import ONLY_LOGITS, is_causal
from backend.engine.embedding.sentence_files import Answers, Mode, PoolingRule
from backend.engine.errors import Unusable
from common.wording import shown

# PyTorch's names of activations, without the names of its modules.
FUNCTIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda values: values,
    "Sigmoid": mx.sigmoid,
    "Tanh": mx.tanh,
    "ReLU": activations.relu,
    "GELU": activations.gelu,
    "SiLU": activations.silu,
    "LeakyReLU": activations.leaky_relu,
    "ELU": activations.elu,
    "Mish": activations.mish,
}
_TINY = 1e-12  # the smallest divisor, as in torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows as arrays, int32, (rows, longest)."""

    ids: mx.array
    mask: mx.array  # 1 for tokens and 0 for padding
    # 1 for tokens that are pooled; 0 for padding and for prompts that are not pooled.
    pooled: mx.array
    segments: mx.array  # the segment ids of the tokens
    lengths: tuple[int, ...]  # number of tokens in each row


def padded(pieces: Sequence[Piece], pad_token: int) -> PaddedRows:
    """Return rows that are padded to the longest row."""
    longest = max(len(piece.ids) for piece in pieces)

    def rectangle(rows: Sequence[list[int]], filler: int) -> mx.array:
        return mx.array([row + [filler] * (longest - len(row)) for row in rows], dtype=mx.int32)

    mask = rectangle([[1] * len(piece.ids) for piece in pieces], 0)
    unpooled = mx.array([[piece.unpooled] for piece in pieces])
    return PaddedRows(
        ids=rectangle([piece.ids for piece in pieces], pad_token),
        mask=mask,
        pooled=mask * (mx.arange(longest) >= unpooled),
        segments=rectangle([piece.segments for piece in pieces], 0),
        lengths=tuple(len(piece.ids) for piece in pieces),
    )


def last_tokens(hidden: mx.array, rows: PaddedRows) -> mx.array:
    """Return the vector of each row's last token, (rows, dim)."""
    last = mx.array([length - 1 for length in rows.lengths])
    return hidden[mx.arange(len(rows.lengths)), last]


def pool(hidden: mx.array, rows: PaddedRows, mode: Mode) -> mx.array:
    """Pool token vectors, (rows, longest, dim), to one float32 vector per row, (rows, dim)."""
    hidden = hidden.astype(mx.float32)
    if mode == "cls":
        return hidden[mx.arange(len(rows.lengths)), mx.argmax(rows.pooled, axis=1)]
    if mode == "last":
        return last_tokens(hidden, rows)
    mask = rows.pooled[..., None].astype(mx.float32)
    if mode == "max":
        return mx.max(mx.where(mask > 0, hidden, -mx.inf), axis=1)
    if mode == "weighted_mean":
        mask = mask * mx.arange(1, hidden.shape[1] + 1, dtype=mx.float32)[None, :, None]
    # The vectors of padding may be NaN, which multiplication by 0 would not remove.
    total = mx.sum(mx.where(mask > 0, hidden, 0.0) * mask, axis=1)
    weight = mx.maximum(mx.sum(mask, axis=1), _TINY)
    return total / (mx.sqrt(weight) if mode == "mean_sqrt_len" else weight)


def normalized(vectors: mx.array) -> mx.array:
    """Scale vectors along the last axis to length 1."""
    return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), _TINY)


Compute = Callable[[PaddedRows], mx.array]
Function = Callable[[mx.array], mx.array]


def function_of(name: str, what: str) -> Function:
    """Return an activation. Raises Unusable for an unknown one."""
    if name not in FUNCTIONS:
        supported = " and ".join(FUNCTIONS)
        raise Unusable(
            f"{what} has the activation {shown(name)}, but only {supported} are supported"
        )
    return FUNCTIONS[name]


def passes(compute: Compute, pad_token: int) -> Run:
    """Return a pass that pads rows, and returns an output for each row.

    compute: returns outputs, (rows, …), or outputs for tokens, (rows, longest, numbers), of which
        those of padding are removed.
    """

    def run(pieces: Sequence[Piece]) -> list[np.ndarray]:
        rows = padded(pieces, pad_token)
        outputs = np.array(compute(rows))
        if outputs.ndim < 3:
            return list(outputs)
        return [part[:length] for part, length in zip(outputs, rows.lengths, strict=True)]

    return run


def embedder(
    hidden: Compute,
    rule: PoolingRule,
    of_tokens: Sequence[Any] = (),
    of_texts: Sequence[Any] = (),
    score: Function | None = None,
) -> Compute:
    """Return a function that computes a vector, (dim,), for each row.

    of_tokens: functions to apply to the vectors of tokens.
    of_texts: functions to apply to the pooled vectors.
    score: turns the first number of a vector into a score, (); None to compute vectors.

    With the pooling mode `none`, it computes the vectors of all tokens, (tokens, dim).
    """

    def vectors_of(rows: PaddedRows) -> mx.array:
        vectors = hidden(rows)
        for layer in of_tokens:
            vectors = layer(vectors)
        if rule.per_token:
            vectors = vectors.astype(mx.float32)
        else:
            pooled = [pool(vectors, rows, mode) for mode in rule.modes]
            vectors = mx.concatenate(pooled, axis=-1)
            for layer in of_texts:
                vectors = layer(vectors)
        if score is not None:
            return score(vectors[:, 0].astype(mx.float32))
        vectors = normalized(vectors) if rule.normalize else vectors
        return vectors[..., : rule.dimensions]

    return vectors_of


def classifier(model: Any, config: Mapping[str, Any], score: Function) -> Compute:
    """Return a function that computes a cross-encoder's score, (), for each pair.

    A text model computes the score from its last token, not counting padding tokens, which a
    tokenizer may also append as the end of a text.
    """
    inner, pads = inner_model(model), config.get("pad_token_id")
    hidden = None if inner is None else text_states(model, config)

    def scores(rows: PaddedRows) -> mx.array:
        if hidden is None:
            logits = _logits(model, rows)[:, 0]
        else:
            read = rows.mask if pads is None else (rows.ids != pads).astype(mx.int32)
            last = mx.argmax(read * mx.arange(rows.ids.shape[1]), axis=1)
            states = hidden(rows)[mx.arange(len(rows.lengths)), last]
            logits = model.score(states)[:, 0].astype(mx.float32)
        return score(logits)

    return scores


def token_classifier(model: Any) -> Compute:
    """Return a function that computes the label probabilities of each row, (tokens, labels)."""
    return lambda rows: mx.softmax(_logits(model, rows), axis=-1)


def answers(model: Any, config: Mapping[str, Any], tokens: Answers, score: Function) -> Compute:
    """Return a function that computes a score, (), for each prompt, from logits of the next token.

    tokens: the token or the two tokens whose logits are used.
    score: turns the logit, or the difference of both logits, into a score.
    """
    inner, head = inner_model(model), getattr(model, "lm_head", None)
    project = head or inner.embed_tokens.as_linear
    hidden, cap = text_states(model, config), config.get("final_logit_softcapping")

    def scores(rows: PaddedRows) -> mx.array:
        logits = project(last_tokens(hidden(rows), rows)).astype(mx.float32)
        logits = mx.tanh(logits / cap) * cap if cap else logits
        found = logits[:, tokens.yes]
        if tokens.no is not None:
            found = found - logits[:, tokens.no]
        return score(found)

    return scores


def encoder(model: Any, module: str, config: Mapping[str, Any]) -> Compute:
    """Return a function that computes the hidden states of an embedding model."""
    if not module:
        return text_states(model, config)
    return lambda rows: _outputs(model, rows).last_hidden_state


def text_states(model: Any, config: Mapping[str, Any]) -> Compute:
    """Return a function that computes the hidden states of a model of mlx-lm.

    With a causal mask, padding at the end has no effect.
    """
    inner = inner_model(model)
    if config["model_type"] in ("gemma2", "gemma3_text"):
        return lambda rows: _gemma(inner, config, rows)
    # mlx-lm's layers of Mistral have no window.
    window = int((config["model_type"] == "mistral" and config.get("sliding_window")) or 0)
    causal = is_causal(config)

    def hidden(rows: PaddedRows) -> mx.array:
        states: mx.array
        if causal and not 0 < window < rows.ids.shape[1]:
            states = inner(rows.ids, cache=None)
            return states
        if causal:
            mask = create_causal_mask(rows.ids.shape[1], window_size=window)
        else:
            mask = rows.mask.astype(mx.bool_)[:, None, None, :]
        states = inner(rows.ids, cache=[_NoCache(mask)] * len(inner.layers))
        return states

    return hidden


def _gemma(inner: Any, config: Mapping[str, Any], rows: PaddedRows) -> mx.array:
    """Compute the hidden states of Gemma 2 and 3, some of whose layers attend within a window.

    mlx-lm's pass is not used, because it rounds the scale of embeddings to bfloat16, and its
    Gemma 2 has no window.
    """
    causal = config["model_type"] == "gemma2" or not config.get("use_bidirectional_attention")
    window = int(getattr(inner.args, "sliding_window", config.get("sliding_window") or 4096))
    if causal:
        length = rows.ids.shape[1]
        everywhere = create_causal_mask(length)
        nearby = create_causal_mask(length, window_size=window)
    else:
        everywhere, nearby = attention_masks(rows.mask, window // 2 + 1)
    states = inner.embed_tokens(rows.ids) * inner.args.hidden_size**0.5
    for at, layer in enumerate(inner.layers):
        local = getattr(layer.self_attn, "is_sliding", at % 2 == 0)
        states = layer(states, nearby if local else everywhere, None)
    normed: mx.array = inner.norm(states)
    return normed


class _NoCache:
    """A cache that stores nothing, and returns a mask to the models of mlx-lm."""

    offset = 0

    def __init__(self, mask: mx.array) -> None:
        self._mask = mask

    def make_mask(self, *_: Any, **__: Any) -> mx.array:
        return self._mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def inner_model(model: Any) -> Any:
    """Return the part of an mlx-lm model that returns hidden states; None if there is none."""
    part = getattr(model, "language_model", model)
    return None if getattr(part, "model_type", "") in ONLY_LOGITS else getattr(part, "model", None)


def _logits(model: Any, rows: PaddedRows) -> mx.array:
    logits: mx.array = _outputs(model, rows).logits
    return logits.astype(mx.float32)


def _outputs(model: Any, rows: PaddedRows) -> Any:
    return model(rows.ids, attention_mask=rows.mask, token_type_ids=rows.segments)
