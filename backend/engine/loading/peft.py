"""Reads adapters in PEFT's format, in the form of mlx-lm's layers.

PEFT stores A with the shape (rank, inputs) and B with (outputs, rank), and scales their product by
alpha / rank. mlx-lm's layers have both transposed, as `lora_a` and `lora_b`. `fan_in_fan_out` only
states how GPT-2's own weights are stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from backend.engine.errors import Unusable
from common.wording import shown

if TYPE_CHECKING:
    import mlx.core as mx

WEIGHTS = "adapter_model.safetensors"

_PART = re.compile(
    r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?:embedding_)?"
    r"(?P<part>A|B|magnitude_vector)(?:\.(?!weight$|bias$)(?P<name>[^.]+))?"
    r"(?:\.weight|(?P<bias>\.bias))?$"
)
# The new rows of an embedding or a head, in the order of `trainable_token_indices`.
_ROWS = re.compile(
    r"^(?:base_model\.model\.)?(?P<layer>.+)\.token_adapter\.trainable_tokens_delta(\.default)?$"
)
# The adapters of all tasks, stacked in one tensor, in the weights of jina-embeddings-v3.
_STACKED = re.compile(r"^(?P<layer>.+)\.parametrizations\.weight\.0\.lora_(?P<part>A|B)$")
_PARTS = {"A": "lora_a", "B": "lora_b", "magnitude_vector": "m"}
# The end of the name of an adapted embedding's unchanged weight, which PEFT also saves.
AS_IT_WAS = ".base_layer.weight"
_WRAPPED = re.compile(r"\.(modules_to_save(\.[^.]+)?|base_layer|original_module)(?=\.)")
# Fields that change what is computed, with their only supported value.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "use_qalora": False,
    "use_bdlora": None,
    "layer_replication": None,
    "kasa_config": None,
    "monteclora_config": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}
# Ways of beginning the training that also change the weights of the model.
_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")


class Part(NamedTuple):
    """A tensor of an adapter."""

    layer: str  # the name of the adapted layer
    part: str  # the tensor's name in mlx-lm's layer: `lora_a`, `lora_b` or `m`; or `bias`, of B
    name: str  # the adapter's name, if the file has several adapters; otherwise ''


@dataclass(frozen=True, slots=True)
class Peft:
    """The contents of adapter_config.json."""

    alpha: float  # the alpha of layers that no pattern in `alphas` matches
    alphas: Mapping[str, float] = field(default_factory=dict)  # alphas by patterns of layers' names
    rooted: bool = False  # whether products are divided by the root of the rank, not by the rank
    dora: bool = False  # whether the adapter also sets the magnitudes of weights
    name: str = ""  # the adapter's name, if the file has several adapters
    place: int | None = None  # the adapter's index, if tensors of several adapters are stacked
    saved: tuple[str, ...] = ()  # layers of which the adapter has copies of its own
    # The tokens whose rows the adapter replaces, by the end of a layer's path; '' for all layers.
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of the product B·A in a layer."""
        matching = (
            alpha
            for pattern, alpha in self.alphas.items()
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer)
        )
        return next(matching, self.alpha) / (math.sqrt(rank) if self.rooted else rank)


def read_peft(config: Mapping[str, Any], file: str = "adapter_config.json") -> Peft:
    """Read the configuration of an adapter. Raises Unusable."""
    for key, supported in _PLAIN.items():
        if (value := config.get(key)) not in (supported, None, [], {}):
            raise Unusable(f"its {key} is {shown(value)}, but only {shown(supported)} is supported")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGING):
        raise Unusable(
            f"its init_lora_weights is {shown(begun)}, which also changes the weights of the model:"
            " save it with path_initial_model_for_weight_conversion, or merge it into its model"
        )
    alpha, alphas = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    named = alphas if isinstance(alphas, dict) else {"alpha_pattern": alphas}
    for key, value in {"lora_alpha": alpha, **named}.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise Unusable(f"{key} in {file} is {shown(value)}, not a number")
    for pattern in named:
        try:
            re.compile(pattern)
        except re.error:
            raise Unusable(
                f"alpha_pattern has {shown(pattern)}, which is not a regular expression"
            ) from None
    return Peft(
        float(alpha),  # type: ignore[arg-type]
        {pattern: float(value) for pattern, value in named.items()},
        config.get("use_rslora") is True,
        config.get("use_dora") is True,
        saved=_names(config, "modules_to_save"),
        tokens=_tokens(config.get("trainable_token_indices")),
    )


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or ()
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _tokens(stated: Any) -> dict[str, tuple[int, ...]]:
    """Return the tokens whose rows an adapter replaces, by layer. Raises Unusable."""
    by_layer = stated if isinstance(stated, dict) else {"": stated} if stated else {}
    for tokens in by_layer.values():
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise Unusable(f"its trainable_token_indices is {shown(stated)}, not a list of tokens")
    return {str(layer): tuple(tokens) for layer, tokens in by_layer.items()}


def rows_of(tensor: str, peft: Peft) -> tuple[str, tuple[int, ...]] | None:
    """Return the layer and the tokens whose rows a tensor replaces; None for other tensors."""
    if (match := _ROWS.match(tensor)) is None:
        return None
    layer = match["layer"]
    found = (
        peft.tokens[end] for end in peft.tokens if f".{layer}".endswith(f".{end}" if end else "")
    )
    return layer, next(found, ())


def part_of(tensor: str) -> Part | None:
    """Parse a tensor's name; return None for a weight that replaces a weight of the model."""
    match = _PART.match(tensor)
    if match is None:
        return None
    part = "bias" if match["bias"] else _PARTS[match["part"]]
    return Part(match["layer"], part, match["name"] or "")


def whole_name(tensor: str) -> str:
    """Return the model's name of a weight that modules_to_save replaces."""
    return _WRAPPED.sub("", tensor.removeprefix("base_model.model."))


def layers_of(
    tensors: Mapping[str, mx.array], peft: Peft
) -> dict[str, tuple[dict[str, mx.array], float]]:
    """Return each layer's tensors in mlx-lm's form, and the factor of their product."""
    found: dict[str, dict[str, mx.array]] = {}
    for tensor, value in tensors.items():
        if peft.place is not None and (stacked := _STACKED.match(tensor)):
            layer, name, value = stacked["layer"], _PARTS[stacked["part"]], value[peft.place]
            # The code of jina-embeddings-v3 swaps A and B of an embedding.
            found.setdefault(layer, {})[name] = value if layer.endswith("_embeddings") else value.T
        elif (part := part_of(tensor)) and part.name in (peft.name, "default"):
            found.setdefault(part.layer, {})[part.part] = value.T
    return {
        layer: (parts, peft.scale(layer, parts["lora_a"].shape[1]))
        for layer, parts in found.items()
    }
