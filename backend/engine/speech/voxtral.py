"""Prepares recordings for Voxtral, without mistral-common, which transformers' processor needs.

A prompt for a transcript is the recording as a user's message, the language if it is known, and the
token that asks for a transcript, in the order of mistral-common.
"""

from __future__ import annotations

import base64
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.errors import Unusable
from backend.engine.loading.folder import read_object
from backend.engine.media.items import AUDIO_RATE

_ENDS = (2, 4, 11)  # </s>, [/INST] and <pad>, as in mlx-audio
_BEGIN, _END = ("<s>", "[INST]", "[BEGIN_AUDIO]"), "[/INST]"
_AUDIO, _TRANSCRIBE = "[AUDIO]", "[TRANSCRIBE]"


class Processor:
    """What mlx-audio's Voxtral asks of transformers' processor.

    positions: tokens of the audio of each window of 30 seconds.
    """

    def __init__(self, path: Path, positions: int) -> None:
        """Raises Unusable."""
        from mlx_audio.stt.models.voxtral_realtime.tokenizer import TekkenTokenizer
        from transformers import WhisperFeatureExtractor

        data = read_object(path / "tekken.json")
        control = {each["token_str"]: int(each["rank"]) for each in data["special_tokens"]}
        missing = [name for name in (*_BEGIN, _AUDIO, _END, _TRANSCRIBE) if name not in control]
        if missing:
            raise Unusable(f"tekken.json has no token {missing[0]}, which Voxtral needs")
        first = int(data["config"]["default_num_special_tokens"])
        text = data["vocab"][: int(data["config"]["default_vocab_size"]) - first]
        self._ids = {
            base64.b64decode(each["token_bytes"]): first + at for at, each in enumerate(text)
        }
        self._begin = [control[name] for name in _BEGIN] + [control[_AUDIO]] * positions
        self._begin.append(control[_END])
        self._ask = control[_TRANSCRIBE]
        self._features = WhisperFeatureExtractor.from_pretrained(path)
        self._tekken = TekkenTokenizer(str(path / "tekken.json"))
        # mlx-audio encodes a line break for a sampler that it does not use.
        self.tokenizer = SimpleNamespace(eos_token_ids=_ENDS, encode=self._encode)

    def apply_transcription_request(
        self,
        language: str | None,
        audio: mx.array,
        model_id: str,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return the prompt and the spectrum of a recording of at most 30 seconds."""
        # The tokenizer divides text before punctuation.
        known = [*self._encode("lang"), *self._encode(f":{language}")] if language else []
        features = self._features(np.array(audio), sampling_rate=AUDIO_RATE, return_tensors="np")
        prompt = [*self._begin, *known, self._ask]
        return {"input_ids": [prompt], "input_features": features["input_features"]}

    def decode(self, tokens: list[int]) -> str:
        return str(self._tekken.decode(tokens))

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a word: the parts with the least numbers are joined first."""
        parts = [bytes([byte]) for byte in text.encode()]
        while True:
            joined = [self._ids.get(a + b, math.inf) for a, b in pairwise(parts)]
            if not joined or (best := min(joined)) == math.inf:
                return [self._ids[part] for part in parts]
            at = joined.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
