"""Answers by plain passes of mlx-vlm's own code over whole sequences, without a cache.

Tokens are limited to letters and digits that the tokenizer never joins, so that an answer sent back
as text gives the same tokens, and a stored answer can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import mlx.core as mx
import numpy as np

from backend.engine.request import Sampling
from backend.engine.vision.patches import opencv_replaced
from backend.engine.vision.processor import correct
from tests.engine.vision.seeing import TINY_VISION
from tests.models.tiny_media_eval import load

_VOCABULARY: Mapping[str, int] = json.loads((TINY_VISION / "tokenizer.json").read_text())["model"][
    "vocab"
]
SIGNS = [_VOCABULARY[sign] for sign in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
CLOSE = 1e-4  # of logits, for another order of summation
AMONG_SIGNS = Sampling(temperature=0, logit_bias=tuple((token, 100.0) for token in SIGNS))

# What mlx-vlm's generation passes on from the processor to the language part.
_OF_TOKENS = {"mm_token_type_ids", "token_type_ids"}
# Families in which the model, and not mlx-vlm's generation, passes on the kind of each token.
_BY_MODEL = {"ernie4_5_moe_vl"}
# Families whose processor removes the last token of a prompt with an image.
_DROPS = {"deepseekocr", "deepseekocr_2"}
# Families whose answers forget their own first tokens, but never the prompt.
_FORGET = {"unlimited_ocr", "unlimited-ocr"}
# Families whose prompts are attended to in both directions, and have no roles.
_READ_WHOLE = {"paligemma"}
# Families whose processor writes the prompt.
_IN_PROCESSOR = {"got"}
# Families whose language part only mlx-lm computes rightly: mlx-vlm does not scale its text.
_OF_MLX_LM = {"gemma3n"}

Message = Mapping[str, Any]


class PlainPasses:
    """A checkpoint as mlx-vlm loads it.

    marker: the text that its processor takes for an image; "" where the template writes it. clip:
    the video that its prompts show, and how many frames of it. sound: what its prompts let it hear,
    samples at 16 kHz.
    """

    def __init__(
        self,
        path: Path,
        marker: str = "",
        clip: tuple[Path, int] | None = None,
        sound: np.ndarray | None = None,
    ) -> None:
        with opencv_replaced():
            self._model, self._processor = load(path)
        correct(self._processor)
        self._language = self._model.language_model
        if self._model.config.model_type in _OF_MLX_LM:
            self._language = _by_mlx_lm(path, self._language)
        self._marker = marker
        self._shown: dict[str, Any] = {}
        if clip is not None:
            frames, metadata = evenly(*clip)
            self._shown = {"videos": [frames], "video_metadata": [metadata]}
        if sound is not None:
            self._shown = {"audio": [sound]}

    def prompt_tokens(self, messages: Sequence[Message], images: Sequence[Any]) -> int:
        inputs = self._inputs(messages, images)
        if images:  # one token may stand for many embeddings
            return int(self._embedded(inputs)["inputs_embeds"].shape[1])
        return int(inputs["input_ids"].shape[1])

    def chooses(
        self, messages: Sequence[Message], images: Sequence[Any], answer: Sequence[int]
    ) -> tuple[int, ...]:
        """The best token at each position of an answer, after the tokens of `answer` before it.

        An answer is greedy if it equals what is chosen. Rounding may change a choice: a token of
        `answer` within CLOSE of the best counts as the best.
        """
        inputs = self._inputs(messages, images)
        prompt = inputs["input_ids"]
        if self._model.config.model_type in _FORGET | _READ_WHOLE:
            logits = self._steps(inputs, answer)
        else:
            whole = mx.concatenate([prompt, mx.array([answer[:-1]], dtype=prompt.dtype)], axis=1)
            logits = self._pass(inputs | {"input_ids": whole})
        answering = np.array(logits[0, -len(answer) :])[:, SIGNS]
        return tuple(
            token if among.max() - among[SIGNS.index(token)] < CLOSE else SIGNS[among.argmax()]
            for token, among in zip(answer, answering, strict=True)
        )

    def forgets(
        self, messages: Sequence[Message], images: Sequence[Any], answer: Sequence[int]
    ) -> bool:
        """Whether it is the answer if attention sees the prompt and the last token, none between.

        Computed up to the first token that differs.
        """
        from mlx_lm.models import cache as lm
        from mlx_vlm.models.cache import KVCache, make_prompt_cache

        language = self._language
        cache: list[Any] = make_prompt_cache(language)
        logits = self._pass(self._inputs(messages, images), cache)
        for token in answer:
            if SIGNS[np.array(logits[0, -1])[SIGNS].argmax()] != token:
                return False
            logits = language(mx.array([[token]]), cache=cache).logits
            for layer in cache:
                for part in getattr(layer, "caches", (layer,)):
                    if isinstance(part, KVCache | lm.KVCache):
                        part.trim(1)
        return True

    def _inputs(self, messages: Sequence[Message], images: Sequence[Any]) -> dict[str, Any]:
        from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

        config = self._model.config
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        if config.model_type.lower() in _IN_PROCESSOR:
            text = _in_got_prompt(messages, shown=bool(images))
        elif config.model_type in _READ_WHOLE:
            text = _in_lines(messages, "<image>" * len(images))
        else:
            text = tokenizer.apply_chat_template(
                [self._marked(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        marker = getattr(config, "image_token_index", None)
        if images and config.model_type in _DROPS:
            text += tokenizer.eos_token
        inputs = prepare_inputs(
            self._processor,
            images=list(images) or None,
            prompts=text,
            image_token_index=marker,
            add_special_tokens=should_add_special_tokens(config.model_type, self._processor),
            **self._shown,
        )
        given = {name: value for name, value in inputs.items() if name != "attention_mask"}
        crops = given.get("images_spatial_crop")
        if crops is not None and crops.ndim == 3:  # it reads past their end
            tiles = given["pixel_values"].shape[1]
            given["images_spatial_crop"] = mx.pad(
                crops, [(0, 0), (0, tiles - crops.shape[1]), (0, 0)]
            )
        return given | {"input_ids": mx.array(given["input_ids"])}

    def _marked(self, message: Message) -> Message:
        if not self._marker or isinstance(message["content"], str):
            return message
        texts = [part.get("text", self._marker) for part in message["content"]]
        return {**message, "content": "".join(texts)}

    def _pass(self, inputs: Mapping[str, Any], cache: list[Any] | None = None) -> mx.array:
        if self._model.config.model_type in _BY_MODEL:
            given = {name: value for name, value in inputs.items() if name not in _OF_TOKENS}
            ids, pixels = given.pop("input_ids"), given.pop("pixel_values", None)
            answer: mx.array = self._model(ids, pixels, cache=cache, **given).logits
            return answer
        given = self._embedded(inputs)
        tokens = inputs["input_ids"]
        for name in _OF_TOKENS & inputs.keys():  # those of an answer are text
            kinds = mx.array(inputs[name])
            given[name] = mx.pad(kinds, [(0, 0), (0, tokens.shape[1] - kinds.shape[1])])
        logits: mx.array = self._language(tokens, cache=cache, **given).logits
        return logits

    def _steps(self, inputs: Mapping[str, Any], answer: Sequence[int]) -> mx.array:
        """Logits for each token of `answer`, computed in steps as mlx-vlm generates.

        For some families, the last token of the prompt is a step of its own.
        """
        from mlx_vlm.models.cache import make_prompt_cache

        language, tokens = self._language, inputs["input_ids"]
        embeddings = self._embedded(inputs)["inputs_embeds"]
        cache = make_prompt_cache(language)
        if self._model.config.model_type in _FORGET:
            language(tokens[:, :-1], inputs_embeds=embeddings[:, :-1], cache=cache)
            tokens, embeddings = tokens[:, -1:], embeddings[:, -1:]
        read = language(tokens, inputs_embeds=embeddings, cache=cache).logits[:, -1:]
        steps = (language(mx.array([[token]]), cache=cache).logits for token in answer[:-1])
        return mx.concatenate([read, *steps], axis=1)

    def _embedded(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        rest = dict(inputs)
        ids, pixels = rest.pop("input_ids"), rest.pop("pixel_values", None)
        if (positions := rest.get("position_ids")) is not None:  # HunyuanOCR's, of the prompt
            known, axes = positions.shape[-1], positions.shape[1]
            following = mx.broadcast_to(
                mx.arange(known, ids.shape[1]), (1, axes, ids.shape[1] - known)
            )
            rest["position_ids"] = mx.concatenate([mx.array(positions), following], axis=-1)
        mask = mx.ones(ids.shape, dtype=mx.int32)
        features = self._model.get_input_embeddings(ids, pixels, mask=mask, **rest).to_dict()
        config = self._model.config
        if config.model_type in _OF_MLX_LM:
            shown = (ids >= config.vision_config.vocab_offset)[..., None]
            held = features["inputs_embeds"]
            features["inputs_embeds"] = mx.where(shown, held, held * held.shape[-1] ** 0.5)
        return {name: value for name, value in features.items() if value is not None}


def _in_got_prompt(messages: Sequence[Message], *, shown: bool) -> str:
    from mlx_vlm.models.got import processing_got as got

    first, *others = (message["content"] for message in messages)
    question = first if isinstance(first, str) else first[-1]["text"]
    roles = (got.GOT_USER_ROLE, got.GOT_ASSISTANT_ROLE)
    text: str = got.build_got_prompt(question, has_image=shown)
    for at, answer in enumerate(others):
        text += f"{answer}{got.GOT_SEP}{roles[at % 2]}"
    return text


def _in_lines(messages: Sequence[Message], marker: str) -> str:
    contents = (message["content"] for message in messages)
    lines = (
        [content] if isinstance(content, str) else [part["text"] for part in content[-1:]]
        for content in contents
    )
    return marker + "\n".join(chain.from_iterable(lines))


def _by_mlx_lm(path: Path, language: Any) -> Any:
    """mlx-lm's model with the weights of mlx-vlm's, and with its interface."""
    from mlx.utils import tree_flatten
    from mlx_lm.models import gemma3n

    config = json.loads((path / "config.json").read_text())
    model = gemma3n.Model(gemma3n.ModelArgs.from_dict(config))
    weights: Any = tree_flatten(language.model.parameters())
    model.model.language_model.load_weights(weights)

    class Language:
        make_cache = model.make_cache

        def __call__(
            self, tokens: mx.array, cache: Any = None, inputs_embeds: Any = None, **_: Any
        ) -> Any:
            return SimpleNamespace(logits=model(tokens, cache or model.make_cache(), inputs_embeds))

    return Language()


def evenly(path: Path, taken: int) -> tuple[np.ndarray, Any]:
    """So many frames of a video as mlx-vlm's `load_video` returns them, which needs OpenCV."""
    from mlx_vlm.utils import VideoMetadata

    with av.open(path, "r") as video:
        rate = float(video.streams.video[0].average_rate or 1)
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    count = len(frames)
    places = np.linspace(0, count - 1, taken).round().astype(int).tolist()
    shown = np.stack([frames[place] for place in places]).transpose(0, 3, 1, 2)
    height, width = shown.shape[2:]
    return shown, VideoMetadata(
        total_num_frames=count,
        fps=rate,
        frames_indices=places,
        width=width,
        height=height,
        duration=count / rate,
    )
