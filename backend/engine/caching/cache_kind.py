"""The kind of KV cache that a load request asks for. Pure: nothing here needs MLX or a model.

There are two ways to ask. The fields CacheTypeKey and CacheTypeValue, which a host fills from
`cache_type_k` and `cache_type_v` of a model's configuration, accept llama.cpp's names of types, one
for keys and one for values. The settings `kv_bits` and `kv_group_size`, which are those of mlx-lm,
apply to both keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backend.engine.errors import InvalidRequest
from backend.engine.settings import Settings
from common.field_names import named
from common.wording import shown

_BITS = (2, 3, 4, 5, 6, 8)  # the widths that mx.quantize supports
_GROUPS = (32, 64, 128)
_BLOCK = 32  # values that share a scale in llama.cpp's types

_PLAIN = {"": "", "f16": "", "f32": "float32", "bf16": "bfloat16"}
_QUANTIZED = {"q8_0": 8, "q5_0": 5, "q5_1": 5, "q4_0": 4, "q4_1": 4}
_NAMES = "f16, f32, bf16, q8_0, q5_0, q5_1, q4_0 or q4_1"


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A kind of KV cache.

    key_bits, value_bits: bits per number of keys and of values; 0 means that they are not
        quantised.
    group_size: numbers that share a scale and a bias; 0 means that it depends on the model's head
        size.
    dtype: the type of a part that is not quantised; "" means the type in which the model computes.
    """

    key_bits: int = 0
    value_bits: int = 0
    group_size: int = 0
    dtype: str = ""

    @property
    def quantised(self) -> bool:
        """Whether keys or values are quantised."""
        return bool(self.key_bits or self.value_bits)


def cache_kind(settings: Settings, key: str = "", value: str = "") -> CacheKind:
    """Return the kind that a load request's settings and fields ask for. Raises InvalidRequest.

    q4_0 and q4_1 both become MLX's 4 bits with a scale and a bias for 32 values, which is what
    q4_1 is in llama.cpp; q5_0 and q5_1 likewise.
    """
    kind = _of_fields(key.strip().lower(), value.strip().lower())
    bits, group_size = settings.kv_bits, settings.kv_group_size
    if bits and bits not in _BITS:
        raise InvalidRequest(f"option kv_bits is {bits}: MLX quantises to 2, 3, 4, 5, 6 or 8 bits")
    if group_size and group_size not in _GROUPS:
        raise InvalidRequest(f"option kv_group_size is {group_size}: it must be 32, 64 or 128")
    if bits and (key.strip() or value.strip()) and {bits} != {kind.key_bits, kind.value_bits}:
        raise InvalidRequest(
            f"option kv_bits is {bits}, but {named('CacheTypeKey')} is {shown(key)} and"
            f" {named('CacheTypeValue')} is {shown(value)}: give one of them"
        )
    if bits and not kind.quantised:
        kind = CacheKind(bits, bits)
    if group_size and not kind.quantised:
        raise InvalidRequest(
            f"option kv_group_size is {group_size}, but the KV cache is not quantised: set kv_bits"
            " too, or remove it"
        )
    return replace(kind, group_size=group_size or kind.group_size)


def group_size_for(kind: CacheKind, head_sizes: frozenset[int]) -> int:
    """Return the group size for heads of these sizes. Raises InvalidRequest.

    If none is set, it is 64, mlx-lm's default, or 32 if 64 does not divide the head size.
    """
    sizes = ", ".join(map(str, sorted(head_sizes)))
    for group_size in (kind.group_size,) if kind.group_size else (64, 32):
        if all(size % group_size == 0 for size in head_sizes):
            return group_size
    if kind.group_size > min(_GROUPS):
        raise InvalidRequest(
            f"kv_group_size {kind.group_size} does not divide this model's attention heads, which"
            f" have {sizes} values: use a smaller one, or remove it"
        )
    raise InvalidRequest(
        f"this model's KV cache cannot be quantised: its attention heads have {sizes} values, and"
        " MLX quantises in groups of 32 or more"
    )


def _of_fields(key: str, value: str) -> CacheKind:
    for name, given in (("CacheTypeKey", key), ("CacheTypeValue", value)):
        if given not in _PLAIN and given not in _QUANTIZED:
            raise InvalidRequest(
                f"{named(name)} is {shown(given)}, which MLX does not have: use {_NAMES}"
            )
    types = {_PLAIN.get(key, ""), _PLAIN.get(value, "")} - {""}
    if len(types) > 1:
        raise InvalidRequest(
            f"{named('CacheTypeKey')} is {shown(key)} and {named('CacheTypeValue')} is"
            f" {shown(value)}: what is not quantised has one type, that of the model, so set both"
            " to the same"
        )
    bits = _QUANTIZED.get(key, 0), _QUANTIZED.get(value, 0)
    return CacheKind(*bits, _BLOCK if any(bits) else 0, types.pop() if types else "")
