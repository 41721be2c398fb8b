"""Builds a model that mlx-vlm implements: its text model, and its image and audio input if any.

The load sends a small image through the chat template, processor and encoder, and also a short clip
and a short tone if the model accepts video and audio. If the image fails, the load fails. If the
clip fails, videos are sent to the model as images.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.caching import kv
from backend.engine.errors import Converting, InvalidRequest, ModelRejected, Unusable
from backend.engine.loading import text_builder
from backend.engine.loading.architectures import model_types
from backend.engine.loading.folder import OF_MEDIA, first_fault
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.stages import Stages
from backend.engine.loading.weights import LoadedModel, reason_of
from backend.engine.media.image import image_of
from backend.engine.media.items import AUDIO_RATE, DecodedAudio, MediaContent, Video
from backend.engine.model import Built
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.request import ChatPrompt
from backend.engine.units import MIB
from backend.engine.vision.features import of_text, unusual_features, width_of
from backend.engine.vision.media_plan import AUDIO, IMAGE, VIDEO, MediaItem, MediaPlan, Span
from backend.engine.vision.media_prefill import MediaReader
from backend.engine.vision.media_prompts import Marker, MediaPrompts, learn
from backend.engine.vision.multimodal_model import MultimodalModel
from backend.engine.vision.processor import ItemProcessor, end_tokens, kinds_of, load_processor
from backend.engine.vision.saved_names import IMAGE_TOKEN, read_as_saved, read_in_earlier_form
from common.wording import shown

_log = logging.getLogger(__name__)

_NOT_BUILT = "its image processor cannot be built here:"
_OTHERS = "; serve a family whose processor mlx-vlm has, such as Qwen-VL or Gemma 3"
_HINT = "; to serve its text part alone, set the option type:text"


def build(order: LoadOrder) -> Stages[Built]:
    """Build a model. Begins on `files`, ends on `engine`. Raises ModelRejected, InvalidRequest."""
    from mlx_vlm import utils  # noqa: F401, the import takes seconds, so it happens on this thread

    media = order.checkpoint.media
    open_media_input = partial(_open_media_input, order) if media else None
    try:
        return (yield from text_builder.build(order, _open_multimodal_model, open_media_input))
    except ModelRejected as refusal:
        if media and order.checkpoint.config["model_type"] in model_types():
            refusal.message += _HINT
        raise


def _open_multimodal_model(path: Path) -> tuple[Any, dict[str, Any]]:
    from mlx_vlm import utils

    package: Any = utils
    with read_in_earlier_form(), read_as_saved():
        return MultimodalModel(package.load_model(path, lazy=True)), package.load_config(path)


def _open_media_input(
    order: LoadOrder, loaded: LoadedModel, prompts: PromptBuilder, vocabulary: int
) -> Stages[text_builder.MediaInput]:
    """Open the media input of a loaded model. Begins and ends on `files`. Raises Unusable."""
    settings = order.settings
    with Converting(partial(_refusal, loaded.name, order.checkpoint.path), Exception):
        model: MultimodalModel = loaded.model
        processor = load_processor(
            order.checkpoint.path, trust_remote_code=settings.trust_remote_code
        )
        if not (hasattr(processor, "tokenizer") or hasattr(processor, "image_processor")):
            raise Unusable(
                f"{_NOT_BUILT} its files are missing, or it needs PyTorch, which this backend does"
                f" not use{_OTHERS}"
            )
        _state_image_token(model.whole.config, order.checkpoint.config, processor)
        control = _control_ids(prompts)

        prepares = partial(ItemProcessor, processor, model.whole.config, control.keys(), vocabulary)

        def ends(kind: str, text: str) -> str:
            """Return the control strings that the processor writes around an item, in one string.

            Returns '' if the processor writes none, or does not recognise the marker, which is then
            still next to the item. For a processor that writes a token outside the vocabulary,
            returns the marker with an unused control string.
            """
            try:
                item = prepares({kind: text}).prepare(_sample(kind), f"the first {kind}")
            except InvalidRequest:
                return ""
            if len(item.encoded) == 1:
                unused = _unused(prompts, control.values())
                return unused and text.replace(text.strip(), unused)
            if text in "".join(_around(prompts, item)):
                return ""
            return "".join(
                dict.fromkeys(control.get(at, "") for at in (item.tokens[0], item.tokens[-1]))
            )

        kinds = kinds_of(processor)
        fallbacks = {kind: _of_family(loaded.model_type, kind) for kind in kinds if kind != VIDEO}
        render = _renderer(prompts)
        if loaded.chat_template is None:  # only raw prompts can be answered
            render, fallbacks[IMAGE] = _joined, [*_own_markers(processor), *fallbacks[IMAGE]]
        form = learn(render, prompts.control, kinds, fallbacks, ends)
        if model.family.in_front is not None:
            before = Marker(*model.family.in_front, None, "", several=False, in_front=True)
            form = replace(form, markers={**form.markers, IMAGE: before})
        expanded = {kind: marker.expands for kind, marker in form.markers.items()}
        width = 1
        if IMAGE in expanded:
            first = prepares(expanded).prepare(_sample(IMAGE), f"the first {IMAGE}")
            if len(first.encoded or first.whole) == 1:
                yield "engine"
                width = width_of(model, first)
                yield "files"
        half = settings.vision_cache_mib * MIB // 2
        items = prepares(expanded, most_bytes=half, width=width)
        reader = MediaReader(model, half)
        tried: dict[str, MediaItem] = {}
        for kind in expanded:
            try:
                item = items.prepare(_sample(kind), f"the first {kind}")
                yield "engine"
                _require_seen(reader, item, vocabulary)
                tried[kind] = item
            except Exception as fault:
                if kind == IMAGE:
                    raise
                if kind == VIDEO:
                    _log.info("videos are sent to this model as images: a clip failed (%s)", fault)
                else:
                    _log.warning(
                        "this model will accept no %s: its first item failed", kind, exc_info=True
                    )
            yield "files"
        if not tried:
            raise Unusable("its chat template has no marker for images")
        form = replace(form, markers={kind: form.markers[kind] for kind in tried})
        media = MediaPrompts(
            form,
            items,
            partial(_around, prompts),
            {kind: prompts.tokenize(marker.core) for kind, marker in form.markers.items()},
            order.media_limits,
        )
        prompts.accept_media(media, adds_bos=any(item.bos for item in tried.values()))
        return text_builder.MediaInput(
            reader,
            media,
            tuple(item for kind, item in tried.items() if kind != VIDEO),
            end_tokens(processor),
            reader.reference,
        )


def _refusal(name: str, path: Path, fault: BaseException) -> ModelRejected:
    if isinstance(fault, ModelRejected):
        return fault
    _log.warning("model %s: its first image failed", shown(name), exc_info=fault)
    return Unusable(_why_it_failed(fault, path))


def _why_it_failed(fault: BaseException, path: Path) -> str:
    """Return a clause that explains a fault of a processor or an encoder, with advice."""
    if why := first_fault(path, OF_MEDIA):
        return why
    refused = isinstance(fault, InvalidRequest)
    if refused and isinstance(fault.__context__, Exception):
        fault = fault.__context__  # the exception of the processor
    if "trust_remote_code" in str(fault):
        return (
            "its image processor is Python code of its checkpoint, which runs only if the host sets"
            " trust_remote_code; do so only if you trust its author"
        )
    if isinstance(fault, ImportError):
        return f"{_NOT_BUILT} it needs PyTorch, which this backend does not use{_OTHERS}"
    files = " or ".join(OF_MEDIA)
    if refused:
        return (
            "it failed on its first image, which its processor refuses: a value in"
            f" {files} is missing or wrong{_OTHERS}"
        )
    return f"it failed on its first image: {reason_of(fault, path, settings_file=files)}{_OTHERS}"


def _require_seen(reader: MediaReader, item: MediaItem, vocabulary: int) -> None:
    """Raise Unusable or ValueError if the model does not get an item's features."""
    if not all(0 <= token < vocabulary for token in item.tokens):
        raise unusual_features("tokens outside the vocabulary")
    embeddings = reader.encode(item).embeddings
    if not bool(mx.isfinite(embeddings).all()):
        raise ValueError("its features are not finite")
    tokens = [0, *item.tokens, 0]
    reader.begin(MediaPlan(tokens, [Span(1, item)]), tokens, kv.new_row(reader.model))
    try:
        without = of_text(reader.model, item.tokens).embeddings
    except ValueError:
        return  # the family rejects an item's tokens without the item
    if bool(mx.allclose(embeddings, without)):
        raise ValueError("the item does not change the embeddings")


def _around(prompts: PromptBuilder, item: MediaItem) -> tuple[str, str]:
    """Return the text that the processor writes before and after the item."""
    before, after = item.whole[item.bos : item.first], item.whole[item.first + item.count :]
    return prompts.detokenize(list(before)), prompts.detokenize(list(after))


def _unused(prompts: PromptBuilder, control: Iterable[str]) -> str:
    """Return a control string that the chat template does not write; '' if there is none."""
    turn = {"role": "assistant", "content": "Yes."}
    question = {"role": "user", "content": "No?"}
    rendered = _renderer(prompts)([question, turn, question])
    return next((text for text in control if text not in rendered), "")


def _control_ids(prompts: PromptBuilder) -> dict[int, str]:
    tokens = ((prompts.tokenize(text), text) for text in prompts.control.tokens)
    return {ids[0]: text for ids, text in tokens if len(ids) == 1}


def _sample(kind: str) -> MediaContent:
    if kind == AUDIO:
        tone = np.sin(np.arange(AUDIO_RATE // 2) * 0.17).astype(np.float32) / 4
        return DecodedAudio(tone, AUDIO_RATE, hashlib.sha256(tone.tobytes()).digest())
    from PIL import Image

    radial, linear = Image.radial_gradient("L"), Image.linear_gradient("L")
    if kind == IMAGE:
        return image_of(radial.convert("RGB"))
    small = (image.convert("RGB").resize((128, 128)) for image in (radial, linear, radial, linear))
    frames = tuple(map(image_of, small))
    digest = hashlib.sha256(b"".join(frame.digest for frame in frames)).digest()
    return Video(frames, (0, 1, 2, 3), 4, 1.0, digest)


def _renderer(prompts: PromptBuilder) -> Callable[[Sequence[Any]], str]:
    return lambda messages: prompts.render(ChatPrompt(tuple(messages)))


def _state_image_token(config: Any, stated: Mapping[str, Any], processor: Any) -> None:
    """Let the model and its processor have the same token for the image.

    The model gets the processor's token if config.json states none. The processor gets the stated
    token if the vocabulary lacks its own, which is the family's default.

    config: the model's configuration, in which a token that is not stated has the family's default.
    stated: the contents of config.json.
    """
    token = getattr(processor, "image_token_id", None)
    own = next((stated[name] for name in IMAGE_TOKEN if stated.get(name) is not None), None)
    if own is None and isinstance(token, int):
        for name in IMAGE_TOKEN:
            if hasattr(config, name):
                setattr(config, name, token)
    elif own is not None and hasattr(processor, "image_token_id"):
        tokenizer = processor.tokenizer
        if token in (None, tokenizer.unk_token_id) and 0 <= own < len(tokenizer):
            processor.image_token_id = own
            processor.image_token = tokenizer.convert_ids_to_tokens(own)


def _joined(messages: Sequence[Any]) -> str:
    return "".join(message["content"] for message in messages)


def _own_markers(processor: Any) -> list[str]:
    inner = getattr(processor, "image_token", None)
    ends = (getattr(processor, f"vision_{end}_token", None) for end in ("start", "end"))
    whole = "".join(part or "" for part in (next(ends), inner, next(ends)))
    found = (getattr(processor, "boi_token", None), whole, inner)
    return [marker for marker in found if isinstance(marker, str) and marker]


def _of_family(model_type: str, kind: str) -> list[str]:
    """Return the markers that this family's processor may recognise in text."""
    usual = ["<audio>"] if kind == AUDIO else ["<image>\n", "<image-1>"]
    from mlx_vlm.prompt_utils import MessageFormatter

    counts = {"num_images": int(kind == IMAGE), "num_audios": int(kind == AUDIO)}
    try:
        message = MessageFormatter(model_type).format_message("", **counts)
    except Exception:
        return usual
    content = message.get("content") if isinstance(message, dict) else message
    return [content, *usual] if isinstance(content, str) and content.strip() else usual
