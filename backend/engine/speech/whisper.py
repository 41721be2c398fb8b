"""Whisper: windows of 30 seconds, each decoded with the text before it, with times from its tokens.

mlx-audio computes each window. Its own loop over windows does not end before the recording does, so
this module has one that stops after each, in the same way: the next window begins where the last
complete segment ended, and text that repeats itself or is improbable is decoded again at a higher
temperature. Its tokens equal those of mlx-audio, unless every temperature has failed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.speech.transcript import Segment, Speech, Transcribed, Word

FRAMES = 3000  # in a window
HOP = 160  # samples from one frame to the next
_RATE = 16_000
_EDGE = 200  # samples on each side of a frame's middle
_BLOCK = 6000  # frames whose spectrum is computed at a time
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MOST_REPEATED = 2.4  # a text with a higher compression ratio is decoded again
_LEAST_PROBABLE = -1.0  # and so is a text whose tokens have a lower mean log-probability
_SILENT = 0.6  # probability of no speech, from which improbable text counts as silence
_HOT = 0.5  # temperature above which a text is not a good beginning for the next window


def transcribe(model: Any, speech: Speech) -> Iterator[Transcribed | None]:
    """Yield the segments of each window in turn, and None between other pieces of work."""
    spectrum, floor, frames = yield from _spectrum(speech.samples, model.dims.n_mels)
    language = speech.language
    if not language:
        language = _detected(model, spectrum, floor) if frames and model.is_multilingual else "en"
        yield None
    options = {
        "task": "translate" if speech.translate else "transcribe",
        "language": language,
        "temperature": speech.temperature,
        "fp16": model.dtype == mx.float16,
    }
    tokenizer = model.get_tokenizer(language=language, task=options["task"])
    windows = _Windows(model, tokenizer, options, words=speech.words)
    if speech.prompt:
        tokens = tokenizer.encode(f" {speech.prompt.strip()}")
        windows.said = [token for token in tokens if token < tokenizer.eot]  # only text
    seek = 0
    while seek < frames:
        seek, segments = yield from windows.next(spectrum, floor, seek, frames)
        yield Transcribed(segments, language, min(seek * HOP, len(speech.samples)))
    if not frames:
        yield Transcribed((), language, len(speech.samples))


class _Windows:
    """Decodes the windows of one recording.

    said: the tokens so far, without those of a prompt.
    """

    def __init__(self, model: Any, tokenizer: Any, options: dict[str, Any], *, words: bool) -> None:
        self.said: list[int] = []
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        self._words = words
        self._since = 0  # the first of the tokens that form the next window's prompt
        self._spoken = 0.0  # the end of the latest word, in seconds

    def next(
        self, spectrum: mx.array, floor: mx.array, seek: int, frames: int
    ) -> Generator[None, None, tuple[int, tuple[Segment, ...]]]:
        """Decode the window from frame `seek` on; returns the next window's frame, and segments."""
        size = min(FRAMES, frames - seek)
        mel = (mx.maximum(spectrum[seek : seek + size], floor) + 4.0) / 4.0
        mel = mx.pad(mel, [(0, FRAMES - size), (0, 0)]).astype(self._model.dtype)
        result = yield from self._decoded(mel, seek)
        if result.no_speech_prob > _SILENT and result.avg_logprob <= _LEAST_PROBABLE:
            return seek + size, ()
        tokens = np.array(result.tokens, np.int64)
        is_time = tokens >= self._tokenizer.timestamp_begin
        ends_silently = is_time[-2:].tolist() == [False, True]
        cuts = (np.flatnonzero(is_time[:-1] & is_time[1:]) + 1).tolist()
        if cuts:
            found, following = self._divided(tokens, cuts, seek, size, silent=ends_silently)
        else:
            found, following = [self._whole(tokens, seek, size)], seek + size
        if self._words:
            self._time_words(found, mel, seek, size)
            ended = round(_end_of(found) * _RATE / HOP)
            following = following if ends_silently or ended <= seek else ended
        found = [each for each in found if each["start"] != each["end"] and each["text"].strip()]
        self.said += [token for each in found for token in each["tokens"]]
        if result.temperature > _HOT:
            self._since = len(self.said)
        return following, tuple(map(_segment, found))

    def _decoded(self, mel: mx.array, seek: int) -> Generator[None, None, Any]:
        """Decode a window; again at higher temperatures if its text is bad and not silence.

        If each text is bad, the most probable one that does not repeat itself is returned, with the
        highest temperature. mlx-audio returns the last, which is random words in unclear speech.
        """
        from mlx_audio.stt.models.whisper.decoding import DecodingOptions

        given = self._options["temperature"]
        tries: list[Any] = []
        for temperature in (given,) if given else TEMPERATURES:
            if tries:
                yield None
            # A window's text must not depend on what other requests draw.
            mx.random.seed(seek)
            options = {"prompt": self.said[self._since :], "temperature": temperature}
            tried = self._model.decode(mel, DecodingOptions(**self._options | options))
            tries.append(tried)
            improbable = tried.avg_logprob < _LEAST_PROBABLE
            if improbable and tried.no_speech_prob > _SILENT:
                return tried
            if not improbable and tried.compression_ratio <= _MOST_REPEATED:
                return tried
        best = max(tries, key=lambda t: (t.compression_ratio <= _MOST_REPEATED, t.avg_logprob))
        return replace(best, temperature=tries[-1].temperature)

    def _divided(
        self, tokens: np.ndarray, cuts: list[int], seek: int, size: int, *, silent: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """Divide a window's tokens into segments between pairs of times.

        silent: whether they end with a single time, after which there is no speech; otherwise the
        text after the last pair is decoded again. Returns the next window's frame, too.
        """
        cuts = [*cuts, len(tokens)] if silent else cuts
        parts = [tokens[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
        found = [
            self._new(part, seek + self._frames(part[0]), seek + self._frames(part[-1]))
            for part in parts
        ]
        ended = self._frames(tokens[cuts[-1] - 1])
        return found, seek + (size if silent or not ended else ended)

    def _whole(self, tokens: np.ndarray, seek: int, size: int) -> dict[str, Any]:
        """Make one segment of a window's tokens, which ends at their last time if they have one."""
        times = tokens[tokens >= self._tokenizer.timestamp_begin]
        ended = self._frames(times[-1]) if len(times) else 0
        return self._new(tokens, seek, seek + (ended or size))

    def _frames(self, time: Any) -> int:
        """Return the frame within its window of a token of time."""
        stride = FRAMES // int(self._model.dims.n_audio_ctx)
        return int(time - self._tokenizer.timestamp_begin) * stride

    def _new(self, tokens: np.ndarray, start: int, end: int) -> dict[str, Any]:
        """Make a segment in the form of mlx-audio."""
        ids = tokens.tolist()
        text = self._tokenizer.decode([token for token in ids if token < self._tokenizer.eot])
        times = {"start": start * HOP / _RATE, "end": end * HOP / _RATE}
        return {"tokens": ids, "text": text, "words": []} | times

    def _time_words(self, found: list[dict[str, Any]], mel: mx.array, seek: int, size: int) -> None:
        """Add words and their times to segments."""
        from mlx_audio.stt.models.whisper.timing import add_word_timestamps

        found[0]["seek"] = seek
        add_word_timestamps(
            segments=found,
            model=self._model,
            tokenizer=self._tokenizer,
            mel=mel,
            num_frames=size,
            last_speech_timestamp=self._spoken,
        )
        self._spoken = _end_of(found)


def _end_of(found: list[dict[str, Any]]) -> float:
    """Return the end of the last word, or of the last segment if none has words."""
    words = [word for segment in found for word in segment["words"]]
    return float((words or found)[-1]["end"])


def _segment(found: dict[str, Any]) -> Segment:
    words = tuple(Word(each["start"], each["end"], each["word"]) for each in found["words"])
    start, end, text = found["start"], found["end"], found["text"]
    # Nothing keeps the model from a time before that of the segment's beginning.
    return Segment(start, max(start, end), text, tuple(found["tokens"]), words)


def _detected(model: Any, spectrum: mx.array, floor: mx.array) -> str:
    """Return the likeliest language of the first window."""
    mel = (mx.maximum(spectrum[:FRAMES], floor) + 4.0) / 4.0
    _, shares = model.detect_language(mel.astype(model.dtype))
    return str(max(shares, key=shares.get))


def _spectrum(
    samples: np.ndarray, mels: int
) -> Generator[None, None, tuple[mx.array, mx.array, int]]:
    """Compute the log-mel spectrum, in blocks of a minute, because an hour's FFT takes gigabytes.

    Returns it without the normalisation, its lowest value, and the number of frames of the
    recording. It has at least the frames of a window, the last ones of silence.
    """
    from mlx_audio.utils import hanning, mel_filters, stft

    frames = len(samples) // HOP
    count = max(frames, FRAMES)
    window = hanning(2 * _EDGE, periodic=True)
    filters = mel_filters(_RATE, 2 * _EDGE, mels, norm="slaney", mel_scale=None)
    blocks = []
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        part = _around(samples, start * HOP - _EDGE, (end - 1) * HOP + _EDGE)
        spectrum = stft(
            mx.array(part), window=window, n_fft=2 * _EDGE, hop_length=HOP, center=False
        )
        energy = spectrum.abs().square() @ filters.T
        blocks.append(mx.maximum(energy, 1e-10).log10())
        mx.eval(blocks[-1])
        yield None
    whole = mx.concatenate(blocks)
    floor = whole.max() - 8.0
    mx.eval(whole, floor)
    return whole, floor, frames


def _around(samples: np.ndarray, start: int, end: int) -> np.ndarray:
    """Copy a range; a recording goes on as its mirror image before it, and as silence after it."""
    part = samples[max(start, 0) : end]
    part = np.pad(part, (0, end - max(start, 0) - len(part)))
    return np.concatenate([part[-start:0:-1], part]) if start < 0 else part
