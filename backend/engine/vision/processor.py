"""Runs a model's processor: from decoded media to tokens and the inputs of the model's encoder.

mlx-vlm's processor is called with one decoded item at a time, and with the marker that the chat
template writes for the item. The processor never receives media as strings, because it would open
them as URLs or paths. It runs on prompt threads; MLX arrays in its output are converted to NumPy
immediately.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from backend.engine.errors import InvalidRequest
from backend.engine.loading.folder import read_object
from backend.engine.loading.tokenizer import despite_checks, remember_no_words
from backend.engine.media.audio import resampled
from backend.engine.media.image import image_of
from backend.engine.media.items import AUDIO_RATE, DecodedAudio, DecodedImage, MediaContent, Video
from backend.engine.patching import patch
from backend.engine.recent import Recent
from backend.engine.vision.families import family_of
from backend.engine.vision.features import frozen
from backend.engine.vision.media_plan import AUDIO, IMAGE, VIDEO, MediaItem
from backend.engine.vision.patches import replaced
from common.prefixes import position_of

_log = logging.getLogger(__name__)

_CHANNELS, _FLOAT = 3, 4  # values of a pixel; bytes of a value
_PROBE = 2048, 1536  # pixels of an image that most processors scale down
_NOTHING = 0  # a token whose embedding is replaced by the encoder's
_KINDS = {DecodedImage: IMAGE, Video: VIDEO, DecodedAudio: AUDIO}
# DeepSeek-VL2's output with the tiles of each image. mlx-vlm reads as many rows as there are
# tiles, beyond the array's end, unless it finds a row of 0.
_CROPS = "images_spatial_crop"
_TILED = 2  # DeepSeek-VL2 divides images into tiles only if a prompt has at most so many
# Outputs that belong to the marker's text and not to the item.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def load_processor(path: Path, *, trust_remote_code: bool) -> Any:
    """Load the processor of a checkpoint from the files in its folder. Raises what mlx-vlm raises.

    `local_files_only` is not passed, because many of mlx-vlm's processors set it and would fail.
    mlx-vlm would then silently use transformers' processor, which may not fit the model.
    """
    from mlx_vlm import utils

    extra = {"trust_remote_code": trust_remote_code}
    open_processor: Any = utils.load_processor
    open_image_processor: Any = utils.load_image_processor
    with nullcontext() if trust_remote_code else _running_no_code():
        images = open_image_processor(path, **extra)
        processor = despite_checks(
            read_object(path / "config.json"),
            lambda config: open_processor(path, True, **extra, **config),
        )
    if images is not None:
        processor.image_processor = images
    correct(processor)
    remember_no_words(getattr(processor, "tokenizer", None))
    return processor


@contextmanager
def _running_no_code() -> Iterator[None]:
    """Refuse to run Python files of a checkpoint in the context.

    Some processors of mlx-vlm (Inkling, GOT) trust a tokenizer's code whatever the setting, and
    mlx-vlm hides their exceptions. Raises ValueError if a file would have run.
    """
    from transformers import dynamic_module_utils

    refused: list[ValueError] = []

    def refuse(name: str, *_: Any, **__: Any) -> Any:
        refused.append(
            ValueError(f"{name} is code of the checkpoint, which needs trust_remote_code")
        )
        raise refused[-1]

    try:
        with replaced(dynamic_module_utils, "get_class_in_module", refuse):
            yield
    except Exception:
        if not refused:
            raise
    if refused:
        raise refused[0]


def correct(processor: Any) -> None:
    """Correct what some processors of mlx-vlm do wrongly.

    - The processor of LLaVA passes the tokenizer's arguments to its image processor, which refuses
      them.
    - The processor of Llama 4 writes tokens for the whole image after the tokens for its tiles, but
      does not prepare the whole image. The model would read memory behind the tiles' features.
    - The processor of dots.ocr has the image token of the published checkpoint in its code.
    - Some processors share lazy arrays, which MLX can evaluate only on the thread that made them.
    """
    family = type(processor).__name__
    images: Any = getattr(processor, "image_processor", None)
    if family == "LlavaProcessor":
        patch(images, lambda call, part, pixels, **_: call(part, pixels))
    elif family == "DotsVLProcessor":
        token = processor.image_token
        processor.image_token_id = processor.tokenizer.convert_tokens_to_ids(token)
    elif type(images).__module__.endswith(".llama4.processing_llama4"):
        split = images._split_into_tiles

        def split_completely(image: Any, ratio: Any) -> list[Any]:
            tiles: list[Any] = split(image, ratio)
            return tiles if len(tiles) == 1 else [*tiles, *split(image, (1, 1))]

        images._split_into_tiles = split_completely
    parts = [part for part in vars(processor).values() if hasattr(part, "__dict__")]
    values = (value for part in (processor, *parts) for value in vars(part).values())
    mx.eval([value for value in values if isinstance(value, mx.array)])


@dataclass(eq=False)
class ItemProcessor:
    """Prepares items, one at a time, because the processor's tokenizer is not thread-safe."""

    processor: Any
    config: Any  # the model's configuration
    # The control tokens. The item is what the processor writes from the first control token to the
    # last.
    control: Collection[int]
    # Number of logits. Placeholder tokens beyond the vocabulary (Molmo 2) are replaced in prompts.
    vocabulary: int
    markers: Mapping[str, str]  # by kind, the text that the processor expands to one item
    most_bytes: int = 0  # maximum size of the cache of prepared items
    width: int = 1  # number of embeddings of an item that has only one placeholder token

    def __post_init__(self) -> None:
        self.family = family = family_of(str(getattr(self.config, "model_type", "")))
        self._tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        id_of = self._tokenizer.convert_tokens_to_ids
        self._boundary = id_of(family.boundary) if family.boundary else None
        self._ends = list(map(id_of, family.image_ends))
        self._after = self._tokenizer.eos_token if family.drops_last else ""
        self._recent = Recent[MediaItem](self.most_bytes)
        self._lock = threading.Lock()

    def prepare(self, given: MediaContent, name: str, images: int = 1) -> MediaItem:
        """Prepare an item. Raises InvalidRequest.

        name: the name of the item in error messages, such as `Images[2]`.
        images: number of images in the prompt.
        """
        processor = self.processor
        untiled = images > _TILED and hasattr(processor, "candidate_resolutions")
        if untiled:
            given = replace(given, digest=hashlib.sha256(given.digest + b"untiled").digest())
        with self._lock:
            item = self._recent.get(given.digest)
            if item is not None:
                return item
            try:
                with _untiled(processor) if untiled else nullcontext():
                    item = self._prepared(given)
            except Exception:
                _log.warning("the processor failed on an item", exc_info=True)
                raise InvalidRequest(
                    f"{name} cannot be prepared, because this model's processor failed on its size"
                    " or length: send it larger, smaller or shorter"
                ) from None
            self._recent.put(item.digest, item, item.nbytes)
            return item

    @cached_property
    def used_pixels(self) -> int | None:
        """The number of pixels to which large images are scaled down; None if that is unknown.

        If the processor does not state this number, it is measured with a large image. Pixels of
        all tiles count.
        """
        stated = getattr(getattr(self.processor, "image_processor", None), "max_pixels", None)
        if isinstance(stated, int) and stated > 0:
            return stated
        try:
            with self._lock:
                item = self._prepared(image_of(Image.new("RGB", _PROBE)))
        except Exception:
            _log.info(
                "large JPEGs are decoded at full size: a large image cannot be prepared",
                exc_info=True,
            )
            return None
        found = sum(_bytes(value) for name, value in item.arrays.items() if "pixel" in name)
        pixels = found // (_CHANNELS * _FLOAT)
        return pixels if 0 < pixels < math.prod(_PROBE) else None

    def fitted(
        self, items: Sequence[MediaItem], ranges: Sequence[tuple[int, int]]
    ) -> list[MediaItem]:
        """Return a prompt's items, changed where they depend on the items before them.

        Some families number images, and some write only one boundary between two images. An item
        that was prepared separately has the number 0, and all boundaries.
        """
        fitted: list[MediaItem] = []
        images, end = 0, -1
        for item, (start, stop) in zip(items, ranges, strict=True):
            found = item
            if item.kind == IMAGE:
                found, images = self._numbered(item, images), images + 1
            if start == end and found.tokens[0] == self._boundary:
                found = _changed(found, b"beside", first=found.first + 1, count=found.count - 1)
            fitted.append(found)
            end = stop
        return fitted

    def _numbered(self, item: MediaItem, number: int) -> MediaItem:
        """Return an item with its number in the prompt, if the processor writes numbers."""
        images: Any = getattr(self.processor, "image_processor", None)
        if not number or not getattr(images, "use_image_id", False):
            return item
        texts = (f"{images.im_id_start}{value}{images.im_id_end}" for value in (0, number))
        with self._lock:
            old, new = (
                tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts
            )
        whole = item.whole
        if (at := position_of(old, whole)) < 0:
            return item
        whole = (*whole[:at], *new, *whole[at + len(old) :])
        count = item.count + len(new) - len(old)
        # Features and KV depend on the number.
        return _changed(item, number.to_bytes(4), whole=whole, count=count)

    def _prepared(self, given: MediaContent) -> MediaItem:
        from mlx_vlm.utils import prepare_inputs

        kind = _KINDS[type(given)]
        output = prepare_inputs(
            self.processor,
            prompts="" if self._ends else self.markers[kind] + self._after,
            image_token_index=getattr(self.config, "image_token_index", None),
            add_special_tokens=False,
            **_mlx_vlm_arguments(given, self.processor),
        )
        arrays = {name: frozen(value) for name, value in output.items() if value is not None}
        tokens = tuple(int(token) for token in np.array(arrays["input_ids"]).reshape(-1))
        if self._ends:
            first, last = map(tokens.index, self._ends)
            tokens = tokens[first : last + 1]
        arrays = {name: value for name, value in arrays.items() if name not in _OF_TEXT}
        if (crops := arrays.get(_CROPS)) is not None and crops.ndim == 3:
            tiles = arrays["pixel_values"].shape[1]
            arrays[_CROPS] = np.pad(crops, ((0, 0), (0, tiles - crops.shape[1]), (0, 0)))
        bos = self._bos(tokens, self.markers[kind])
        if bos and len(bare := tuple(n for n in tokens if n != tokens[0])) == 1:
            tokens = bare
        encoded: tuple[int, ...] = ()
        first, count = 0, len(tokens)
        if min(tokens) < 0 or (self.width > 1 and count == 1):
            encoded, count = (min(tokens),), self.width
            tokens = (_NOTHING,) * count
        elif count > 1:
            control = [
                at for at, token in enumerate(tokens) if at >= bos and token in self.control
            ] or [bos, count - 1]
            first, count = control[0], control[-1] + 1 - control[0]
            if max(tokens) >= self.vocabulary:
                encoded = tokens
                tokens = tuple(n if n < self.vocabulary else _NOTHING for n in tokens)
        return MediaItem(
            kind, given.digest, tokens, first, count, arrays, _bytes(arrays), encoded, bos
        )

    def _bos(self, tokens: Sequence[int], marker: str) -> int:
        """Return how many BOS tokens the processor or its tokenizer has written: 1 or 0."""
        text = getattr(self._tokenizer, "bos_token", None)
        begun = isinstance(text, str) and not marker.startswith(text)
        return int(begun and tokens[0] == self._tokenizer.bos_token_id)


def _untiled(processor: Any) -> AbstractContextManager[None]:
    whole = ((processor.image_size, processor.image_size),)
    return replaced(processor, "candidate_resolutions", whole)


def _changed(item: MediaItem, change: bytes, **fields: Any) -> MediaItem:
    return replace(item, digest=hashlib.sha256(item.digest + change).digest(), **fields)


def _mlx_vlm_arguments(given: MediaContent, processor: Any) -> dict[str, Any]:
    """Return mlx-vlm's arguments for an item. A video is [frames, channels, height, width]."""
    match given:
        case DecodedImage():
            return {"images": [given.pixels]}
        case DecodedAudio():  # mlx-vlm does not resample arrays
            rate = getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None)
            rate = rate if isinstance(rate, int) and rate > 0 else AUDIO_RATE
            return {"audio": [resampled(given.samples, given.rate, rate)]}
    from mlx_vlm.utils import VideoMetadata

    frames = np.stack([np.asarray(frame.pixels) for frame in given.frames])
    metadata = VideoMetadata(
        total_num_frames=given.count,
        fps=given.rate,
        frames_indices=list(given.indices),
        width=given.frames[0].width,
        height=given.frames[0].height,
        duration=given.count / given.rate,
    )
    return {"videos": [frames.transpose(0, 3, 1, 2)], "video_metadata": [metadata]}


def end_tokens(processor: Any) -> frozenset[int]:
    """Return end tokens that the processor names in addition to configuration and tokenizer."""
    found = getattr(processor, "additional_eos_token_ids", None) or ()
    unknown = getattr(getattr(processor, "tokenizer", None), "unk_token_id", None)
    return frozenset(token for token in found if isinstance(token, int) and token != unknown)


def kinds_of(processor: Any) -> list[str]:
    """Return the kinds of items that a processor accepts and can prepare."""
    accepted = inspect.signature(getattr(processor, "process", processor)).parameters
    prepares_audio = any(
        getattr(processor, name, None) is not None
        for name in ("feature_extractor", "audio_processor")
    )
    kinds = {IMAGE: True, VIDEO: "videos" in accepted}
    kinds[AUDIO] = prepares_audio and bool({"audio", "audios"} & set(accepted))
    return [kind for kind, prepared in kinds.items() if prepared]


def _bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
