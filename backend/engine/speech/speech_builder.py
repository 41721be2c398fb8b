"""Builds a speech-to-text model, which mlx-audio computes."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine import device as devices
from backend.engine.errors import EngineError, ModelRejected, WrongKind
from backend.engine.loading.folder import read_object
from backend.engine.loading.load_order import LoadOrder
from backend.engine.loading.shards import weight_files
from backend.engine.loading.stages import Stages
from backend.engine.loading.weights import (
    bytes_of,
    cast,
    evaluate,
    proving,
    reason_of,
    too_large,
)
from backend.engine.media.items import AUDIO_RATE
from backend.engine.model import Built
from backend.engine.served_model import ServedModel
from backend.engine.settings import weight_dtype
from backend.engine.speech import voxtral
from backend.engine.speech.speech_families import abilities_of, transcriber
from backend.engine.speech.speech_queue import SpeechQueue
from backend.engine.speech.transcript import Speech
from backend.engine.speech.windows import MOST_SECONDS
from common.context_size import context_of
from common.field_names import named
from common.wording import shown

_log = logging.getLogger(__name__)
_FLOAT = 4  # bytes
_MELS = 128
_FRAMES_PER_SECOND = 100
_WINDOW_FRAMES = 3000
_TIMES = 1501  # tokens of times: from 0 to 30 seconds


def build(order: LoadOrder) -> Stages[Built]:
    """Build a model. Begins on `files`, ends on `engine`. Raises ModelRejected, InvalidRequest."""
    settings, checkpoint = order.settings, order.checkpoint
    name, model_type = checkpoint.name, str(checkpoint.config["model_type"])
    yield "engine"
    here = devices.detect()
    devices.prepare(here)
    type_ = devices.weight_type(here, weight_dtype(settings, order.request.dtype))
    limit = devices.memory_limit(here, settings)
    try:
        model = open_model(checkpoint.path, model_type)
        if model_type == "whisper":
            # Its decoding is written for these two types.
            type_ = "float32" if type_ == "float32" else "float16"
            model.dtype = getattr(mx, type_)
        if type_:
            cast(model, type_)
        size = bytes_of(model)
        if size > limit:
            raise too_large(size, limit)
        yield from evaluate(model, size)
    except EngineError:
        raise
    except Exception as fault:
        _log.warning("model %s: its weights cannot be loaded", shown(name), exc_info=True)
        raise ModelRejected.because(name, reason_of(fault, checkpoint.path)) from None
    plan = devices.memory_plan(here, settings, size)
    transcribe = transcriber(model_type, model)
    needs = partial(_needs, checkpoint.config)
    yield "engine"
    with proving(name, "recording"):  # which also compiles kernels before the first request
        silence = Speech(np.zeros(AUDIO_RATE, np.float32), temperature=1e-3)
        for _ in transcribe(silence):
            pass
    served = ServedModel(
        name=name,
        model_type=model_type,
        context_size=_context(checkpoint.config),
        vocabulary_size=0,
        token_bytes=lambda _: b"",
        new_text=_no_text,
        kind=checkpoint.kind,
        epoch=order.epoch,
        prompts=_NoTokenizer(checkpoint.kind.words),  # type: ignore[arg-type]
        capacity=settings.parallel + settings.max_queue,
        step_timeout=devices.step_timeout(here, settings),
        weights_bytes=size,
        speech=abilities_of(model_type, model),
        media_limits=order.media_limits,
    )
    devices.apply(plan)
    budget = max(plan.limit - size, 0)
    return None, partial(SpeechQueue, transcribe, needs, settings.parallel, budget), served


def open_model(path: Path, model_type: str) -> Any:
    """Return a model with its weights still lazy, and its tokenizer.

    mlx-audio's own function also derives the type from the folder's name, and lets Qwen3-ASR run
    code of the checkpoint.
    """
    from mlx_audio.utils import apply_quantization, load_config

    module = importlib.import_module(f"mlx_audio.stt.models.{_MODULES.get(model_type, model_type)}")
    config = load_config(path) | {"model_path": str(path)}
    made = module.Model(module.ModelConfig.from_dict(config))
    model = getattr(made, "_model", made)  # that of Qwen3-ASR is inside another object
    # Mistral adds all weights in its own form, and IBM those of a draft model.
    files = weight_files(file.name for file in path.iterdir())
    weights: Any = {}
    for file in files:
        weights |= mx.load(str(path / file))
    weights.pop("proj_out.weight", None)  # Whisper's copy of its embeddings
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    apply_quantization(model, config, weights, getattr(model, "model_quant_predicate", None))
    model.load_weights(list(weights.items()))
    model.eval()
    _prepare(model, model_type, path)
    return model


_MODULES = {"granite_speech_plus": "granite_speech"}


def _prepare(model: Any, model_type: str, path: Path) -> None:
    """Give a model its tokenizer, and what else it does not read itself."""
    from transformers import AutoTokenizer, WhisperFeatureExtractor

    match model_type:
        case "whisper":
            model._processor = SimpleNamespace(tokenizer=_whisper_tokenizer(path))
            if heads := _alignment_heads(path, model.dims):
                model.set_alignment_heads(heads)
        case "qwen3_asr":
            model._tokenizer = AutoTokenizer.from_pretrained(path)
            model._feature_extractor = WhisperFeatureExtractor.from_pretrained(path)
            model.config.model_repo = ""
        case "canary" | "sensevoice":
            type(model).post_load_hook(model, path)  # reads only files of SentencePiece
        case "voxtral":
            part = model.config.audio_config
            positions = part.max_source_positions * part.hidden_size // part.intermediate_size
            model._processor = voxtral.Processor(path, positions)
        case "voxtral_realtime":
            from mlx_audio.stt.models.voxtral_realtime.tokenizer import TekkenTokenizer

            model._tokenizer = TekkenTokenizer.from_model_path(path)
        case "glmasr" | "granite_speech" | "granite_speech_plus" | "moonshine":
            model._tokenizer = AutoTokenizer.from_pretrained(path)


def _whisper_tokenizer(path: Path) -> Any:
    """Return a tokenizer with the tokens of times, which follow all others.

    Older files lack them: Whisper then reads other tokens as times, and its text is wrong.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<|{at / 50:.2f}|>" for at in range(_TIMES)], special_tokens=True)
    before, first = tokenizer.convert_tokens_to_ids(["<|notimestamps|>", "<|0.00|>"])
    if first != before + 1:
        raise ValueError("its tokenizer does not have <|0.00|> after <|notimestamps|>")
    vocabulary = tokenizer.get_vocab()
    tokenizer.get_vocab = lambda: vocabulary  # mlx-audio reads it three times per window
    return tokenizer


def _alignment_heads(path: Path, dims: Any) -> list[list[int]]:
    """Return the heads of the decoder that show the times of words; none if the files list none."""
    file = path / "generation_config.json"
    heads = read_object(file).get("alignment_heads") if file.is_file() else None
    found = [[int(number) for number in head] for head in heads or ()]
    if any(
        not (0 <= layer < dims.n_text_layer and 0 <= head < dims.n_text_head)
        for layer, head in found
    ):
        raise ValueError("alignment_heads in generation_config.json names a head that is not there")
    return found


def _context(config: dict[str, Any]) -> int:
    """Return the tokens of a window's text, with those of the text before it."""
    own = config.get("max_target_positions") or config.get("n_text_ctx")
    return own if isinstance(own, int) and own > 0 else context_of(config)


def _needs(config: dict[str, Any], speech: Speech) -> int:
    """Return the bytes for a recording: its samples and spectrum, and the activations of a window.

    The largest activations are the attention weights of the encoder's frames to each other.
    """
    part = config.get("audio_config") or config.get("encoder") or config
    numbers = part if isinstance(part, dict) else config
    heads = next(
        (numbers[key] for key in _HEADS if isinstance(numbers.get(key), int)), _USUAL_HEADS
    )
    positions = _WINDOW_FRAMES // 2
    activations = 4 * heads * positions**2 * _FLOAT
    seconds = max(len(speech.samples) / AUDIO_RATE, MOST_SECONDS)
    spectrum = 2 * int(seconds * _FRAMES_PER_SECOND) * _MELS * _FLOAT
    return activations + spectrum + len(speech.samples) * _FLOAT


_HEADS = ("encoder_attention_heads", "n_audio_head", "n_heads")
_USUAL_HEADS = 20


def _no_text(_: bool) -> Any:
    raise AssertionError("a model of speech gets no request for text")


class _NoTokenizer:
    """Refuses to tokenise, because the tokens of the model are only those of transcripts."""

    def __init__(self, words: str) -> None:
        self._refusal = f"the loaded model {words}"

    def tokenize(self, _text: str) -> list[int]:
        raise WrongKind(f"{named('TokenizeString')} is not served: {self._refusal}")

    def detokenize(self, _tokens: list[int]) -> str:
        raise WrongKind(f"{named('Detokenize')} is not served: {self._refusal}")
