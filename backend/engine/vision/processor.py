"""Runs a model's processor: from decoded media to tokens and the inputs of the model's encoder.

mlx-vlm's processor is called with one decoded item at a time and the marker that the chat template
writes for it. It never receives media as strings, which it would open as URLs or paths. It runs on
prompt threads; the MLX arrays that it returns are converted to NumPy immediately.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from backend.engine.errors import InvalidRequest
from backend.engine.loading.json_files import read_object
from backend.engine.loading.tokenizer import despite_checks, remember_no_words
from backend.engine.media.items import SOUND_RATE, Picture, Sound, Video
from backend.engine.media.picture import picture_of
from backend.engine.media.sound import resampled
from backend.engine.patching import patch
from backend.engine.vision.features import frozen
from backend.engine.vision.media_plan import MediaItem

_log = logging.getLogger(__name__)

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
FIELDS = {IMAGE: "Images", VIDEO: "Videos", AUDIO: "Audios"}
_CHANNELS, _FLOAT = 3, 4  # of a pixel; bytes of a value
_PROBE = 2048, 1536  # pixels of an image that most processors scale down
_NOTHING = 0  # the token in place of an embedding, which no layer reads
_KINDS = {Picture: IMAGE, Video: VIDEO, Sound: AUDIO}
# DeepSeek-VL2: the tiles of each image. mlx-vlm 0.7.10 reads as many entries as there are tiles,
# which is beyond the array's end; it stops at an entry of 0.
_CROPS = "images_spatial_crop"
_TILED = 2  # more images in a prompt are not divided into tiles
# Outputs for the marker's text, which do not depend on the item.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def load_processor(path: Path, *, trust_remote_code: bool) -> Any:
    """The processor of a checkpoint, from the files in its folder. Raises what mlx-vlm raises.

    Many of mlx-vlm's processors set `local_files_only` themselves and fail if it is passed. mlx-vlm
    would then silently fall back to transformers' processor, which may not fit the model.
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
    compute_constants(processor)
    complete_tiles(processor)
    number_image_token(processor)
    drop_arguments_for_text(processor)
    remember_no_words(getattr(processor, "tokenizer", None))
    return processor


@contextmanager
def _running_no_code() -> Iterator[None]:
    """Run no Python file of a checkpoint. Raises ValueError if that was attempted.

    Some processors of mlx-vlm trust a tokenizer's code whatever the setting (Inkling and GOT in
    0.7.10), and mlx-vlm hides their exceptions.
    """
    from transformers import dynamic_module_utils as modules

    run: Any = modules.get_class_in_module
    refused: list[str] = []

    def refuse(name: str, *_: Any, **__: Any) -> Any:
        refused.append(name)
        raise ValueError(f"{name} is code of the checkpoint, which needs trust_remote_code")

    modules.get_class_in_module = refuse
    try:
        yield
    except Exception:
        if not refused:
            raise
    finally:
        modules.get_class_in_module = run
    if refused:
        refuse(refused[0])


def drop_arguments_for_text(processor: Any) -> None:
    """Keep the tokenizer's arguments from an image processor.

    LLaVA's processor in mlx-vlm 0.7.10 gives both the same, which transformers rejects.
    """
    if type(processor).__name__ != "LlavaProcessor":
        return
    patch(processor.image_processor, lambda own, images, given, **_: own(images, given))


def complete_tiles(processor: Any) -> None:
    """Let Llama 4 also see the whole image, for which its prompts have tokens after the tiles'.

    mlx-vlm 0.7.10 leaves the whole image out (`llama4/processing_llama4.py`). The model then takes
    the features of these tokens from memory that lies behind those of the tiles.
    """
    images: Any = getattr(processor, "image_processor", None)
    if not type(images).__module__.endswith(".llama4.processing_llama4"):
        return
    split = images._split_into_tiles

    def split_completely(image: Any, ratio: Any) -> list[Any]:
        tiles: list[Any] = split(image, ratio)
        return tiles if len(tiles) == 1 else [*tiles, *split(image, (1, 1))]

    images._split_into_tiles = split_completely


def number_image_token(processor: Any) -> None:
    """Give the processor of dots.ocr the tokenizer's number of the image token.

    mlx-vlm 0.7.10 has the number of the published checkpoint in its code, and refuses others.
    """
    if type(processor).__name__ == "DotsVLProcessor":
        token = processor.image_token
        processor.image_token_id = processor.tokenizer.convert_tokens_to_ids(token)


def compute_constants(processor: Any) -> None:
    """Evaluate the lazy arrays of a processor, which MLX can do only on the thread that made them.

    mlx-vlm may cache such an array and share it among processors.
    """
    parts = [part for part in vars(processor).values() if hasattr(part, "__dict__")]
    mx.eval([
        value
        for part in (processor, *parts)
        for value in vars(part).values()
        if isinstance(value, mx.array)
    ])  # fmt: skip


class ItemProcessor:
    """Prepares items, one at a time, because the processor's tokenizer is not thread-safe.

    markers: by kind, the text that the processor expands to one item. control: the control tokens;
    text that the processor writes before the first and after the last of them does not belong to
    the item. most_bytes: size of the cache of prepared items. width: number of embeddings that one
    placeholder token stands for, if it is not one. vocabulary: number of logits; placeholder tokens
    beyond it (Molmo 2) never reach a prompt.
    """

    def __init__(
        self,
        processor: Any,
        config: Any,
        markers: Mapping[str, str],
        control: Collection[int],
        most_bytes: int,
        width: int = 1,
        vocabulary: int = 1 << 62,
    ) -> None:
        self.width = width
        self._vocabulary = vocabulary
        self._control = control
        self._processor = processor
        self._image_token = getattr(config, "image_token_index", None)
        self._markers = markers
        self._number = _number(processor)
        family = type(processor).__name__
        texts: Any = getattr(processor, "tokenizer", None)
        # Idefics 2's writes this token around each image, and once where two meet.
        edge = processor.fake_image_token if family == "Idefics2Processor" else None
        self._boundary: int | None = edge and texts.convert_tokens_to_ids(edge)
        # DeepSeek-OCR's removes this token, with which a conversation for training ends.
        self._dropped: str = texts.eos_token if family.startswith("DeepseekOCR") else ""
        # GOT's writes a complete prompt around an image, unless its input is one.
        ends = ["<img>", "</img>"] if family == "GotOcrProcessor" else []
        self._alone: list[int] = texts.convert_tokens_to_ids(ends) if ends else []
        # PaliGemma's writes the BOS token after the image, and a line break after the text.
        self.begins = family == "PaliGemmaProcessor"
        self.ending = "\n" if self.begins else ""
        self._rate = _sound_rate(processor)
        self._most_bytes = most_bytes
        self._prepared_items: OrderedDict[bytes, MediaItem] = OrderedDict()
        self._lock = threading.Lock()
        self._used: int | None = None
        self._probed = False

    def prepare(self, given: Picture | Video | Sound, name: str, images: int = 1) -> MediaItem:
        """Prepare an item. name: the item in error messages, such as `Images[2]`. images: how many
        its prompt has.

        Raises InvalidRequest.
        """
        kind = _KINDS[type(given)]
        with self._lock:
            untiled = images > _TILED and hasattr(self._processor, "candidate_resolutions")
            if untiled:
                given = replace(given, digest=hashlib.sha256(given.digest + b"untiled").digest())
            digest = given.digest
            if digest in self._prepared_items:
                self._prepared_items.move_to_end(digest)
                return self._prepared_items[digest]
            try:
                with _untiled(self._processor) if untiled else nullcontext():
                    item = self._prepared(given, kind)
            except Exception as fault:
                _log.warning("the processor failed on an item", exc_info=True)
                raise InvalidRequest(
                    f"{name} cannot be prepared for this model ({type(fault).__name__}): send it in"
                    " another size or length"
                ) from None
            self._keep(item)
            return item

    def used_pixels(self) -> int | None:
        """The number of pixels to which large images are scaled down; None if that is unknown.

        If the processor has no setting for it, it is measured with a large image.
        """
        with self._lock:
            if not self._probed:
                self._probed = True
                named = getattr(
                    getattr(self._processor, "image_processor", None), "max_pixels", None
                )
                self._used = named if isinstance(named, int) and named > 0 else self._of_probe()
            return self._used

    def _of_probe(self) -> int | None:
        """Number of pixels that the processor makes of a large image, including its tiles."""
        probe = Image.new("RGB", _PROBE)
        try:
            item = self._prepared(picture_of(probe), IMAGE)
        except Exception:
            _log.info(
                "large JPEGs are decoded at full size: the processor failed on a large image",
                exc_info=True,
            )
            return None
        found = sum(_bytes(value) for name, value in item.arrays.items() if "pixel" in name)
        pixels = found // (_CHANNELS * _FLOAT)
        return pixels if 0 < pixels < math.prod(_PROBE) else None

    @property
    def spaces(self) -> bool:
        """Whether the processor writes a space between an image and a word after it."""
        return self._boundary is not None

    def beside(
        self, items: Sequence[MediaItem], places: Sequence[tuple[int, int]]
    ) -> list[MediaItem]:
        """One prompt's items in order, with one boundary where two images meet.

        places: (start, stop) of their markers in the prompt.
        """
        if self._boundary is None:
            return list(items)
        ends = [None, *(stop for _, stop in places[:-1])]
        return [
            _without_boundary(item) if start == end and item.tokens[0] == self._boundary else item
            for item, (start, _), end in zip(items, places, ends, strict=True)
        ]

    def numbered(self, items: Sequence[MediaItem]) -> list[MediaItem]:
        """One prompt's items in order, with consecutive image numbers if the family writes any.

        An item that was prepared on its own has the number 0.
        """
        if self._number is None:
            return list(items)
        images = iter(range(len(items)))
        return [
            self._with_number(item, next(images)) if item.kind == IMAGE else item for item in items
        ]

    def _with_number(self, item: MediaItem, number: int) -> MediaItem:
        assert self._number is not None
        opening, closing = self._number
        tokenizer = self._processor.tokenizer
        with self._lock:
            none, own = (
                tuple(tokenizer.encode(f"{opening}{each}{closing}", add_special_tokens=False))
                for each in (0, number)
            )
        at = next(
            (at for at in range(len(item.whole)) if item.whole[at : at + len(none)] == none), -1
        )
        if number == 0 or at < 0:
            return item
        return replace(
            item,
            # Another number gives other features and other KV, so the digest covers it.
            digest=hashlib.sha256(item.digest + number.to_bytes(4)).digest(),
            whole=(*item.whole[:at], *own, *item.whole[at + len(none) :]),
            count=item.count + len(own) - len(none),
        )

    def _prepared(self, given: Picture | Video | Sound, kind: str) -> MediaItem:
        from mlx_vlm.utils import prepare_inputs

        output = prepare_inputs(
            self._processor,
            prompts="" if self._alone else self._markers[kind] + self._dropped,
            image_token_index=self._image_token,
            add_special_tokens=False,
            **_as_mlx_vlm_takes(given, self._rate),
        )
        arrays = {name: frozen(value) for name, value in output.items() if value is not None}
        tokens = tuple(int(token) for token in np.array(arrays["input_ids"]).reshape(-1))
        if self._alone:
            first, last = map(tokens.index, self._alone)
            tokens = tokens[first : last + 1]
        arrays = {name: value for name, value in arrays.items() if name not in _OF_TEXT}
        if (crops := arrays.get(_CROPS)) is not None and crops.ndim == 3:
            tiles = arrays["pixel_values"].shape[1]
            arrays[_CROPS] = np.pad(crops, ((0, 0), (0, tiles - crops.shape[1]), (0, 0)))
        opening = self._opens(tokens, self._markers[kind])
        if opening and len(bare := tuple(one for one in tokens if one != tokens[0])) == 1:
            tokens = bare
        encoded: tuple[int, ...] = ()
        if min(tokens) < 0 or (self.width > 1 and len(tokens) == 1):
            encoded = (min(tokens),)
            first, count = 0, self.width
            tokens = (_NOTHING,) * count
        elif len(tokens) == 1:
            first, count = 0, 1
        else:
            places = [
                at for at, token in enumerate(tokens) if at >= opening and token in self._control
            ] or [opening, len(tokens) - 1]
            first, count = places[0], places[-1] + 1 - places[0]
            if max(tokens) >= self._vocabulary:
                encoded = tokens
                tokens = tuple(one if one < self._vocabulary else _NOTHING for one in tokens)
        return MediaItem(
            kind, given.digest, tokens, first, count, arrays, _bytes(arrays), encoded, opening
        )

    def _opens(self, tokens: Sequence[int], marker: str) -> int:
        """How many tokens the processor or its tokenizer wrote to begin a prompt: 1 or 0."""
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        text = getattr(tokenizer, "bos_token", None)
        return int(
            isinstance(text, str)
            and not marker.startswith(text)
            and tokens[0] == tokenizer.bos_token_id
        )

    def _keep(self, item: MediaItem) -> None:
        if item.nbytes > self._most_bytes:
            return
        self._prepared_items[item.digest] = item
        while sum(kept.nbytes for kept in self._prepared_items.values()) > self._most_bytes:
            self._prepared_items.popitem(last=False)


@contextmanager
def _untiled(processor: Any) -> Iterator[None]:
    """Make DeepSeek-VL2's processor show an image without tiles, as it does with several."""
    resolutions = processor.candidate_resolutions
    processor.candidate_resolutions = ((processor.image_size, processor.image_size),)
    try:
        yield
    finally:
        processor.candidate_resolutions = resolutions


def _as_mlx_vlm_takes(given: Picture | Video | Sound, rate: int) -> dict[str, Any]:
    """mlx-vlm's arguments for an item. A video: [frames, channels, height, width], and metadata.

    rate: samples per second that the processor expects of sounds.
    """
    match given:
        case Picture():
            return {"images": [given.pixels]}
        case Sound():
            return {"audio": [resampled(given.samples, given.rate, rate)]}
    from mlx_vlm.utils import VideoMetadata

    frames = np.stack([np.asarray(frame.pixels) for frame in given.frames])
    first = given.frames[0]
    metadata = VideoMetadata(
        total_num_frames=given.count,
        fps=given.rate,
        frames_indices=list(given.places),
        width=first.width,
        height=first.height,
        duration=given.count / given.rate,
    )
    return {"videos": [frames.transpose(0, 3, 1, 2)], "video_metadata": [metadata]}


def _without_boundary(item: MediaItem) -> MediaItem:
    digest = hashlib.sha256(item.digest + b"beside").digest()
    return replace(item, digest=digest, first=item.first + 1, count=item.count - 1)


def _number(processor: Any) -> tuple[str, str] | None:
    """The text that the processor writes around an image's number; None if it writes no numbers."""
    images = getattr(processor, "image_processor", None)
    if images is None or not getattr(images, "use_image_id", False):
        return None
    return images.im_id_start, images.im_id_end


def _sound_rate(processor: Any) -> int:
    """The sample rate that the processor expects: mlx-vlm does not resample arrays."""
    named = getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None)
    return named if isinstance(named, int) and named > 0 else SOUND_RATE


def end_tokens(processor: Any) -> frozenset[int]:
    """The processor's own end tokens, in addition to those of configuration and tokenizer."""
    found = getattr(processor, "additional_eos_token_ids", None) or ()
    unknown = getattr(getattr(processor, "tokenizer", None), "unk_token_id", None)
    return frozenset(token for token in found if isinstance(token, int) and token != unknown)


def takes_audio(processor: Any) -> bool:
    """Whether the processor accepts sounds and can turn them into features."""
    if not {"audio", "audios"} & _parameters(processor):
        return False
    return any(
        getattr(processor, name, None) is not None
        for name in ("feature_extractor", "audio_processor")
    )


def takes_videos(processor: Any) -> bool:
    """Whether the processor accepts videos."""
    return "videos" in _parameters(processor)


def _parameters(processor: Any) -> set[str]:
    return set(inspect.signature(getattr(processor, "process", processor)).parameters)


def _bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0
