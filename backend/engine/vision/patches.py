"""Corrects language parts of mlx-vlm that compute a batch, or a prompt in passes, wrongly.

`opencv_replaced` provides a replacement for OpenCV, which multi_modality imports to scale images
for an encoder. OpenCV takes 150 MB, and the build that mlx-vlm requires needs libGL, which servers
lack. Each other function patches the layers of one model, and does nothing for families without the
fault:

- `scale_by_row` (Mistral 3 and 4, `mistral3/language.py`): mlx-vlm scales the queries of all rows
  by the position of the first row, which is wrong if only some rows are longer than the original
  context. It does not scale Mistral 4's by YaRN's `mscale_all_dim`, as mlx-lm and transformers do.
- `mask_blocks_of_pass` (Gemma 4's larger models, `gemma4/language.py`): mlx-vlm lets the tokens of
  an image attend to each other only in a pass with the whole prompt.
- `use_mlx_lm` (Gemma 3n, `gemma3n/language.py`): mlx-vlm does not scale the embeddings of a
  prompt's text. In layers that use another layer's KV, it rotates queries by positions that depend
  on how a prompt is divided into passes.
- `place_rows` (HunyuanOCR, `hunyuan_vl/language.py`): mlx-vlm uses positions with four axes only in
  a pass that begins a prompt, and counts the positions of all rows from the end of one row's KV.
- `choose_by_group` (MiniMax M3, `minimax_m3_vl/language.py`): once a text has more blocks of keys
  than a query attends to, mlx-vlm lets all heads attend to the same blocks. In transformers and
  mlx-lm, each group of heads has its own.
- `join_windows` (DeepSeek-V4, `deepseek_v4/language.py`): a window of compressed KV also contains
  the tokens of the previous window. mlx-vlm uses zeros instead for the first window of each pass,
  so several passes have other results than one pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import apply_yarn_mscale
from mlx_vlm.models.base import create_attention_mask
from PIL import Image

from backend.engine.patching import WithOffset, patch

_ANGLES = 1024  # tokens by which the tables of rotations grow


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value in the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def scale_by_row(language: Any) -> None:
    """Let each layer scale every row by the row's own position, and Mistral 4's also by YaRN."""
    rope = getattr(getattr(language, "config", None), "rope_parameters", None) or {}
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return
    length = rope["original_max_position_embeddings"]

    def scaled(
        call: Any, layer: Any, x: mx.array, scale: mx.array, mask: Any = None, cache: Any = None
    ) -> Any:
        offset = getattr(cache, "offset", 0)
        if isinstance(offset, mx.array) and offset.ndim:
            positions = offset[:, None] + mx.arange(x.shape[1])
            scale = 1 + beta * mx.log(1 + mx.floor(positions / length))
            scale = scale[:, None, :, None].astype(x.dtype)
        return call(layer, x, scale, mask, cache=cache)

    for layer in language.model.layers:
        patch(layer, scaled)
        if language.model_type == "mistral4":
            layer.self_attn.scale = apply_yarn_mscale(layer.self_attn.scale, rope)


def mask_blocks_of_pass(language: Any) -> bool:
    """Let the tokens of an image in a pass attend to each other, if the family requires it.

    Returns whether it does.
    """
    wanted = getattr(getattr(language, "config", None), "use_bidirectional_attention", None)
    if wanted != "vision":
        return False
    patch(language.model, _unmask_blocks, "_apply_blockwise_bidirectional_overlay")
    return True


def _unmask_blocks(_: Any, text: Any, causal: mx.array, token_types: mx.array) -> mx.array:
    """Return the mask with each image's tokens unmasked.

    causal: the mask, [tokens, keys] or [rows, 1, tokens, keys]. The last keys are the pass's
        tokens.
    """
    blocks = text._block_sequence_ids_for_mask(token_types)
    same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] >= 0)
    before = causal.shape[-1] - same.shape[-1]
    return causal | mx.pad(same[:, None], [(0, 0), (0, 0), (0, 0), (before, 0)])


def use_mlx_lm(language: Any) -> None:
    """Run Gemma 3n by mlx-lm's classes, which read the same attributes and two more numbers."""
    if not type(language).__module__.endswith(".gemma3n.language"):
        return
    from mlx_lm.models import gemma3n

    text = language.model
    text.__class__ = gemma3n.LanguageModel
    for name in ("sliding_window", "final_logit_softcapping"):
        setattr(text, name, getattr(text.config, name))
    for layer in text.layers:
        layer.__class__ = gemma3n.Gemma3nDecoderLayer
        layer.self_attn.__class__ = gemma3n.Gemma3nAttention

    def embed(call: Any, embedding: Any, tokens: mx.array) -> Any:
        return call(embedding, tokens) * text.hidden_size**0.5

    def call(
        _: Any, __: Any, inputs: mx.array, inputs_embeds: Any = None, cache: Any = None, **___: Any
    ) -> Any:
        if inputs_embeds is None:  # mlx-lm would scale them again
            inputs_embeds = text.embed_tokens(inputs)
        return text(inputs, cache, inputs_embeds)

    patch(text.embed_tokens, embed)
    patch(language, call)


def place_rows(language: Any) -> int:
    """Accept `position_ids`, [axes, rows, tokens], in every pass.

    Returns the number of axes, or 0 for other families.
    """
    scaling = getattr(getattr(language, "args", None), "rope_scaling", None) or {}
    sections = scaling.get("xdrope_section")
    if sections is None or not hasattr(language, "get_xdrope_input_positions"):
        return 0
    rotary = language.model.layers[0].self_attn.rotary_emb  # the same numbers in all layers
    patch(rotary, lambda _, part, *__, **___: (part._cos_cached, part._sin_cached))

    def call(
        _: Any,
        part: Any,
        inputs: mx.array,
        inputs_embeds: Any = None,
        mask: Any = None,
        cache: Any = None,
        position_ids: Any = None,
        **__: Any,
    ) -> Any:
        longest = cache[0].size() + inputs.shape[1]
        rotary._update_cache(-(-longest // _ANGLES) * _ANGLES, part.model.norm.weight.dtype)
        starts = [WithOffset(layer, 0) for layer in cache]  # the positions are passed
        mask = create_attention_mask(inputs, cache) if mask is None else mask
        out = part.model(inputs, inputs_embeds, mask, starts, mx.swapaxes(position_ids, 0, 1))
        tied = part.args.tie_word_embeddings
        return (part.model.embed_tokens.as_linear if tied else part.lm_head)(out)

    patch(language, call)
    for layer in language.model.layers:
        layer.self_attn.rotary_emb = rotary
    return len(sections)


def choose_by_group(language: Any) -> None:
    """Let each group of heads attend to the blocks of keys that its own index head chooses."""
    if not type(language).__module__.endswith(".minimax_m3_vl.language"):
        return

    def choose(call: Any, part: Any, queries: mx.array, *rest: Any) -> mx.array:
        return mx.stack([call(part, head, *rest) for head in queries.split(queries.shape[1], 1)], 1)

    def unmask(call: Any, part: Any, blocks: mx.array, *rest: Any) -> mx.array:
        found = mx.concatenate([call(part, own, *rest) for own in mx.unstack(blocks, axis=1)], 1)
        return mx.repeat(found, part.attention.num_attention_heads // found.shape[1], 1)

    def attend(call: Any, part: Any, *arrays: Any) -> mx.array | None:
        *heads, blocks, mask, positions = arrays
        if any(array.shape[1] % blocks.shape[1] for array in heads):
            return None
        groups = zip(*(array.split(blocks.shape[1], 1) for array in heads), strict=True)
        found = [
            call(part, *group, own, mask, positions)
            for group, own in zip(groups, mx.unstack(blocks, axis=1), strict=True)
        ]
        return None if any(each is None for each in found) else mx.concatenate(found, axis=1)

    for layer in language.model.layers:
        if layer.self_attn.has_sparse_index:
            patch(layer.self_attn.indexer, choose, "select_blocks")
            patch(layer.self_attn.indexer, unmask, "build_block_mask")
            patch(layer.self_attn, attend, "_sparse_prefill_attention")
            patch(layer.self_attn, attend, "_sparse_decode_attention")


def join_windows(language: Any) -> None:
    """Let the first window of a pass overlap with the last window of the pass before."""
    if not type(language).__module__.endswith(".deepseek_v4.language"):
        return
    from mlx_vlm.models.deepseek_v4.language import Compressor, _overlap_compress_kv

    def compress(call: Any, part: Any, x: mx.array, cache: Any, offset: Any) -> Any:
        if cache is None:
            return call(part, x, cache, offset)
        *found, base = cache.accumulate_windows(part.wkv(x), part.wgate(x), offset)
        ratio = part.compress_ratio
        if not found[0].size:
            return cache.update_and_fetch(mx.zeros((len(x), 0, part.head_dim), dtype=x.dtype))
        before = getattr(cache, "last_window", None)
        cache.last_window = [mx.contiguous(array[:, -ratio:]) for array in found]
        if before is not None:
            pairs = zip(before, found, strict=True)
            found = [mx.concatenate(list(pair), axis=1) for pair in pairs]
        windows = (mx.unflatten(array, 1, (-1, ratio)) for array in found)
        pooled = _overlap_compress_kv(*windows, part.ape, part.head_dim)
        pooled = part.norm(pooled[:, int(before is not None) :])
        # The window is computed with the pass, because a lazy window would need all KV of the pass.
        pooled = mx.depends(pooled, cache.last_window)
        return cache.update_and_fetch(part.rope(pooled[:, None], offset=base).squeeze(1))

    for _, part in language.named_modules():
        if isinstance(part, Compressor) and part.overlap:
            patch(part, compress)


@contextmanager
def opencv_replaced() -> Iterator[None]:
    """Let modules that are imported in the context find a replacement for OpenCV as `cv2`."""
    original = sys.modules.get("cv2")
    sys.modules["cv2"] = _OPENCV
    try:
        yield
    finally:
        del sys.modules["cv2"]
        if original is not None:
            sys.modules["cv2"] = original


def _resize(image: Any, dsize: tuple[int, int], *, interpolation: Any, **_: Any) -> Any:
    """Scale a float32 image, [height, width, channels], to `dsize`, (width, height)."""
    channels = (Image.fromarray(image[..., at]) for at in range(image.shape[-1]))
    return np.stack(
        [np.asarray(channel.resize(dsize, interpolation)) for channel in channels], axis=-1
    )


_OPENCV: Any = ModuleType("cv2")
_OPENCV.resize = _resize
_OPENCV.INTER_LANCZOS4 = Image.Resampling.LANCZOS
_OPENCV.INTER_NEAREST = Image.Resampling.NEAREST
