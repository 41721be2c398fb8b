"""Adapters in PEFT's format, read as mlx-lm's layers have them.

PEFT stores A as (rank, inputs) and B as (outputs, rank), and scales their product by alpha / rank.
mlx-lm's layers have both the other way round, as `lora_a` and `lora_b`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from common.wording import shown

if TYPE_CHECKING:
    import mlx.core as mx

WEIGHTS = "adapter_model.safetensors"

_PART = re.compile(
    r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?:embedding_)?"
    r"(?P<part>A|B|magnitude_vector)(?:\.(?!weight$)(?P<name>[^.]+))?(?:\.weight)?$"
)
# Of the adapters of all tasks, one behind another, in the weights of jina-embeddings-v3.
_STACKED = re.compile(r"^(?P<layer>.+)\.parametrizations\.weight\.0\.lora_(?P<part>A|B)$")
_PARTS = {"A": "lora_a", "B": "lora_b", "magnitude_vector": "m"}
# The end of the name of an adapted embedding, which PEFT also saves as it is in the model.
AS_IT_WAS = ".base_layer.weight"
_WRAPPED = re.compile(r"\.(modules_to_save(\.[^.]+)?|base_layer|original_module)(?=\.)")
# Values that change what is computed, and the only ones that are supported.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "use_qalora": False,
    "use_bdlora": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}


class Part(NamedTuple):
    """What a tensor is: the layer that it adapts, and its name in mlx-lm.

    name: of the adapter, if a file has several; else "".
    """

    layer: str
    part: str
    name: str


@dataclass(frozen=True, slots=True)
class Peft:
    """What adapter_config.json states.

    alphas: by patterns of layers' names; other layers have `alpha`. rooted: whether products are
    divided by the root of the rank. dora: whether the magnitudes of weights are set too.

    name: the adapter's, if a file has several. place: the adapter's, if its tensors are those of
    several adapters one behind another.
    """

    alpha: float
    alphas: Mapping[str, float] = field(default_factory=dict)
    rooted: bool = False
    dora: bool = False
    name: str = ""
    place: int | None = None

    def scale(self, layer: str, rank: int) -> float:
        """The factor of the product B·A in a layer."""
        own = (
            alpha
            for pattern, alpha in self.alphas.items()
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer)
        )
        return next(own, self.alpha) / (math.sqrt(rank) if self.rooted else rank)


def read_peft(config: Mapping[str, Any]) -> Peft:
    """Read adapter_config.json. Raises ValueError: a clause for the message to the user."""
    for key, supported in _PLAIN.items():
        if (value := config.get(key)) not in (supported, None, [], {}):
            raise ValueError(
                f"its {key} is {shown(value)}, but only {shown(supported)} is supported"
            )
    alpha, alphas = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    named = alphas if isinstance(alphas, dict) else {"alpha_pattern": alphas}
    for key, value in {"lora_alpha": alpha, **named}.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"{key} in adapter_config.json is {shown(value)}, not a number")
    for pattern in named:
        try:
            re.compile(pattern)
        except re.error:
            raise ValueError(f"alpha_pattern has {shown(pattern)}, which is no pattern") from None
    return Peft(
        float(alpha),  # type: ignore[arg-type]
        {pattern: float(value) for pattern, value in named.items()},
        config.get("use_rslora") is True,
        config.get("use_dora") is True,
    )


def part_of(tensor: str) -> Part | None:
    """What the tensor with this name is; None for a weight that replaces the model's own."""
    match = _PART.match(tensor)
    if match is None:
        return None
    return Part(match["layer"], _PARTS[match["part"]], match["name"] or "")


def whole_name(tensor: str) -> str:
    """The model's name of a weight that is replaced, as modules_to_save says."""
    return _WRAPPED.sub("", tensor.removeprefix("base_model.model."))


def layers_of(
    tensors: Mapping[str, mx.array], peft: Peft
) -> dict[str, tuple[dict[str, mx.array], float]]:
    """Each layer's tensors in mlx-lm's form, and the factor of their product."""
    found: dict[str, dict[str, mx.array]] = {}
    for tensor, value in tensors.items():
        if peft.place is not None and (stacked := _STACKED.match(tensor)):
            layer, part, own = stacked["layer"], _PARTS[stacked["part"]], value[peft.place]
            # The code of jina-embeddings-v3 swaps the parts of an embedding.
            found.setdefault(layer, {})[part] = own if layer.endswith("_embeddings") else own.T
        elif (one := part_of(tensor)) and one.name in (peft.name, "default"):
            found.setdefault(one.layer, {})[one.part] = value.T
    return {
        layer: (parts, peft.scale(layer, parts["lora_a"].shape[1]))
        for layer, parts in found.items()
    }
