"""EAGLE-3 (https://arxiv.org/abs/2503.01840): a layer trained to guess for one model.

From a token's embedding and the states in front of three of the model's layers it predicts the
token after, and continues from its own states. The layers are mlx-vlm's
(`speculative.drafters.eagle3`). Its drafter around them stores one KV for all its sequences and
samples guesses itself, so only `fc`, `layers`, `norm` and `lm_head` are used, which no release
promises to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.rope_utils import initialize_rope

from backend.engine.drafting.batch_guesser import Choices
from backend.engine.drafting.head_weights import HeadError, Weights, embedding_of, load_weights
from backend.engine.sampling.logits_head import LogitsHead

_STATES = 3  # layers of the model whose states it reads
_KEY = "eagle_aux_hidden_state_layer_ids"


class EagleHead(Module):
    """The layers of an EAGLE-3 checkpoint. Its KV is a cache for each layer.

    drafter: mlx-vlm's module.
    embedding: replaces its own, unless it is None.
    """

    inner: Any
    _embed: Any

    def __init__(self, drafter: Any, embedding: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = drafter
        if embedding is not None:
            drafter.pop("embed_tokens")
        # A function: an attribute would count the model's embedding as a part of the head.
        self._embed = lambda tokens: (embedding or drafter.embed_tokens)(tokens)
        self._size = _STATES * drafter.target_hidden_size

    @property
    def layers(self) -> list[Any]:
        return list(self.inner.layers)

    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, *, cache: list[Any]
    ) -> mx.array:
        """Return the head's states after each of the tokens, [rows, tokens, size].

        tokens: [rows, tokens].
        states: those that the tokens were chosen from, the model's of all places or the head's own,
            [rows, tokens, its size]; None means zeros, to measure what the head costs.
        """
        embedded = self._embed(tokens)
        if states is None:
            states = mx.zeros((*tokens.shape, self._size), embedded.dtype)
        if states.shape[-1] == self._size:
            if self.inner.input_norm is not None:
                states = self.inner.input_norm(states)
            states = self.inner.fc(states)
        mask = create_attention_mask(states, cache[0])
        first, *others = self.inner.layers
        states = first(embedded, states, mask, cache[0], None)
        for layer, layer_cache in zip(others, cache[1:], strict=True):
            states = layer(states, mask, layer_cache, None)
        return states


def eagle_places(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return the three layers of the model before which an EAGLE-3 checkpoint reads the states.

    In vLLM's convention the configuration names these layers; in SGLang's (`eagle_config`) it names
    the layers whose results the states are. Without either, the layers are near the start, in the
    middle and near the end. Raises HeadError.
    """
    nested = config.get("eagle_config")
    if own := config.get(_KEY):
        places = [int(place) for place in own]
    elif isinstance(nested, Mapping) and (own := nested.get(_KEY)):
        places = [int(layer) + 1 for layer in own]
    else:
        places = [2, layers // 2, layers - 3]
    if len(places) != _STATES:
        raise HeadError(f"it reads states before layers {places}, but EAGLE-3 reads three of them")
    return places


def open_eagle(
    config: Mapping[str, Any],
    weights: Weights,
    model: Any,
    size: int,
    vocabulary: int,
    projection: LogitsHead,
) -> tuple[EagleHead, Choices]:
    """Return the head for a model, its weights still lazy, and how its states become tokens.

    weights: of the checkpoint.
    size: of the model's states.
    vocabulary: of the model.
    projection: the model's.

    Raises HeadError.
    """
    from mlx_vlm.speculative.drafters.eagle3 import Eagle3DraftModel, ModelConfig

    own = ModelConfig.from_dict(_nested(config))
    text = own.transformer_layer_config
    if own.target_hidden_size != size:
        raise HeadError(
            f"it was trained for a model whose states have {own.target_hidden_size} numbers, but"
            f" those of this model have {size}"
        )
    drafter = Eagle3DraftModel(own)
    for layer in drafter.layers:
        layer.self_attn.rope = initialize_rope(
            text.head_dim,
            text.rope_theta,
            text.rope_traditional,
            _rope_scaling(config),
            text.max_position_embeddings,
        )
    weights = drafter.sanitize(
        {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    )
    if own.draft_vocab_size == text.vocab_size:
        weights.pop("d2t", None)
    if "lm_head.weight" not in weights:
        drafter.lm_head = None
    if drafter.lm_head is None and (own.draft_vocab_size != vocabulary or not projection.found):
        raise HeadError("its weights lack lm_head.weight")
    embedding = None
    if not own.embed_requires_grad or "embed_tokens.weight" not in weights:
        embedding = embedding_of(model, vocabulary)
        if embedding(mx.array([0])).shape[-1] != text.hidden_size:
            embedding = None
        else:
            weights = {at: value for at, value in weights.items() if "embed_tokens." not in at}
    if embedding is None and text.vocab_size < vocabulary:
        raise HeadError(
            f"its vocabulary has {text.vocab_size} tokens, but that of this model has {vocabulary}"
        )
    head = EagleHead(drafter, embedding)
    own_weights = {f"inner.{at}": value for at, value in weights.items()}
    load_weights(head, own_weights, "EAGLE-3", exact=True)
    if drafter.d2t is not None:
        tokens = mx.arange(own.draft_vocab_size) + drafter.d2t
        mx.eval(tokens)
        if not ((tokens >= 0) & (tokens < vocabulary)).all():
            raise HeadError(f"its d2t has token ids beyond the {vocabulary} of this model")
        return head, Choices(_projection(drafter, projection), own.draft_vocab_size, tokens)
    return head, Choices(_projection(drafter, projection), min(own.draft_vocab_size, vocabulary))


def _projection(drafter: Any, main: LogitsHead) -> Any:
    """Return the function from states to logits: the head's projection or the model's."""
    project = drafter.lm_head if drafter.lm_head is not None else main.project
    return lambda states: project(drafter.norm(states))


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in the form of Speculators: that of the layers is a nested object.

    Other programs write it like the configuration of a Llama model.
    """
    if "transformer_layer_config" in config:
        return dict(config)
    return {
        "draft_vocab_size": config.get("draft_vocab_size") or config.get("vocab_size"),
        **config,
        "transformer_layer_config": dict(config),
    }


def _rope_scaling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    inner = config.get("transformer_layer_config", config)
    scaling = inner.get("rope_scaling") or inner.get("rope_parameters")
    return dict(scaling) if isinstance(scaling, Mapping) else None
