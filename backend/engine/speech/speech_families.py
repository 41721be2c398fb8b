"""The speech-to-text models of mlx-audio that transcribe a recording in windows cut at pauses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.engine.media.items import AUDIO_RATE
from backend.engine.speech import whisper
from backend.engine.speech.transcript import Segment, Speech, SpeechAbilities, Transcribed, Word
from backend.engine.speech.windows import windows

Result = tuple[tuple[Segment, ...], str]


def transcriber(model_type: str, model: Any) -> Callable[[Speech], Iterator[Transcribed | None]]:
    """Return the function that transcribes with a model."""
    if model_type == "whisper":
        return partial(whisper.transcribe, model)
    return partial(_in_windows, partial(_OTHERS[model_type], model))


def abilities_of(model_type: str, model: Any) -> SpeechAbilities:
    """Return what a model reads of a request."""
    match model_type:
        case "parakeet":
            return SpeechAbilities(times_words=True)
        case "qwen3_asr":
            languages = _with_names(_qwen_languages(model))
            return SpeechAbilities(languages, samples=True)
        case "voxtral":
            return SpeechAbilities(_with_names(_VOXTRAL_LANGUAGES), samples=True)
        case "granite_speech" | "granite_speech_plus":
            languages = _with_names(_GRANITE_LANGUAGES)
            return SpeechAbilities(languages, translates=True, samples=True)
        case "canary":
            languages = _with_names(model.config.supported_languages)
            return SpeechAbilities(languages, translates=True, samples=True)
        case "sensevoice":
            return SpeechAbilities(_with_names(_SENSEVOICE_LANGUAGES))
        case "voxtral_realtime" | "glmasr" | "moonshine":
            return SpeechAbilities(samples=True)
    several = bool(model.is_multilingual)
    codes = dict.fromkeys(_codes().values())  # in Whisper's order
    known = list(codes)[: model.num_languages] if several else ["en"]
    return SpeechAbilities(_with_names(known), translates=several, samples=True, times_words=True)


def _codes() -> Mapping[str, str]:
    """Return the codes of languages by their names, in English and without capitals."""
    from mlx_audio.stt.models.whisper.tokenizer import TO_LANGUAGE_CODE

    codes: Mapping[str, str] = TO_LANGUAGE_CODE
    return codes


def _with_names(codes: Collection[str]) -> dict[str, str]:
    """Return the codes by themselves, and by the names of their languages."""
    named = {name: code for name, code in _codes().items() if code in codes}
    return {code: code for code in codes} | named


def _qwen_languages(model: Any) -> dict[str, str]:
    """Return the names by which a model knows languages, by their codes."""
    own = {str(name).lower(): str(name) for name in model.config.support_languages}
    named = {"filipino": "tl", **_codes()}
    return {named[name]: own[name] for name in own if name in named}


def _in_windows(
    transcribe: Callable[[Speech, mx.array], Result], speech: Speech
) -> Iterator[Transcribed]:
    for start, end in windows(speech.samples):
        offset = start / AUDIO_RATE
        segments, language = transcribe(speech, mx.array(speech.samples[start:end]))
        begun = " " if start else ""  # windows are separated by a space
        shifted = tuple(
            _shifted(segment, offset, "" if at else begun)
            for at, segment in enumerate(segments)
            if segment.text.strip()
        )
        yield Transcribed(shifted, language or speech.language, end)


def _shifted(segment: Segment, offset: float, begun: str) -> Segment:
    words = tuple(Word(w.start + offset, w.end + offset, w.text) for w in segment.words)
    text = segment.text if segment.text.startswith(" ") else begun + segment.text
    return Segment(segment.start + offset, segment.end + offset, text, segment.tokens, words)


def _parakeet(model: Any, _speech: Speech, audio: mx.array) -> Result:
    """Segments as the model divides them; audio shorter than a frame has none."""
    return tuple(map(_sentence, model.generate(audio, dtype=_dtype(model)).sentences)), ""


def _sentence(sentence: Any) -> Segment:
    """Return a segment with its words, each of which begins with a token that has a space first."""
    words: list[Word] = []
    for token in sentence.tokens:
        if words and not token.text.startswith(" "):
            last = words[-1]
            words[-1] = Word(last.start, float(token.end), last.text + token.text)
        else:
            words.append(Word(float(token.start), float(token.end), token.text))
    ids = tuple(int(token.id) for token in sentence.tokens)
    return Segment(float(sentence.start), float(sentence.end), sentence.text, ids, tuple(words))


def _qwen3_asr(model: Any, speech: Speech, audio: mx.array) -> Result:
    """Transcribe in the given language, or in the one that the model names."""
    names = _qwen_languages(model)
    options = {"language": names.get(speech.language), "system_prompt": speech.prompt or None}
    segments, named = _generated(model, speech, audio, **options)  # `named` is a list
    return segments, next((code for code, name in names.items() if name in named), "")


def _voxtral(model: Any, speech: Speech, audio: mx.array) -> Result:
    stream = mx.default_stream(mx.default_device())  # mlx-audio's default is no stream
    return _generated(model, speech, audio, language=speech.language, generation_stream=stream)


def _granite(model: Any, speech: Speech, audio: mx.array) -> Result:
    """Use mlx-audio's prompts; that for a translation names only the language of the text."""
    options = {"language": "en"} if speech.translate else {"source_language": speech.language}
    words = [speech.prompt] if speech.prompt else None
    wanted = {name: value or None for name, value in options.items()}
    return _generated(model, speech, audio, hotwords=words, **wanted)


def _canary(model: Any, speech: Speech, audio: mx.array) -> Result:
    """Transcribe from English if no language is given: the model does not detect it."""
    spoken = speech.language or "en"
    wanted = "en" if speech.translate else spoken
    options = {"source_lang": spoken, "target_lang": wanted, "dtype": _dtype(model)}
    segments, _ = _generated(model, speech, audio, max_tokens=_CANARY_TOKENS, **options)
    return segments, spoken


def _sensevoice(model: Any, speech: Speech, audio: mx.array) -> Result:
    segments, found = _generated(model, speech, audio, language=speech.language or "auto")
    return segments, found if found in _SENSEVOICE_LANGUAGES else ""


def _moonshine(model: Any, speech: Speech, audio: mx.array) -> Result:
    return _generated(model, speech, audio, dtype=_dtype(model))


def _generated(model: Any, speech: Speech, audio: mx.array, **options: Any) -> Result:
    """Return one segment for a window, as the model's `generate` answers it."""
    mx.random.seed(len(audio))
    result = model.generate(
        mx.pad(audio, (0, max(_LEAST_SAMPLES - len(audio), 0))),
        **{"temperature": speech.temperature, "max_tokens": _MOST_TOKENS} | options,
    )
    return (Segment(0.0, len(audio) / AUDIO_RATE, result.text),), result.language or ""


def _dtype(model: Any) -> Any:
    """Return the type in which a model computes."""
    leaves: dict[str, Any] = {}
    tree_flatten(model.parameters(), destination=leaves)
    types = (leaf.dtype for leaf in leaves.values())
    return next((each for each in types if mx.issubdtype(each, mx.floating)), mx.float32)


_MOST_TOKENS = 1024  # for 30 seconds
_CANARY_TOKENS = 1000  # and its prompt; it has 1024 positions
_LEAST_SAMPLES = 1600  # shorter audio is less than what some models read at a time
# As their makers list them.
_VOXTRAL_LANGUAGES = ("en", "es", "fr", "pt", "hi", "de", "nl", "it")
_SENSEVOICE_LANGUAGES = ("zh", "en", "yue", "ja", "ko")
_GRANITE_LANGUAGES = ("en", "fr", "de", "es", "pt", "ja", "it", "zh")
_OTHERS: Mapping[str, Callable[[Any, Speech, mx.array], Result]] = {
    "canary": _canary,
    "glmasr": _generated,
    "granite_speech": _granite,
    "granite_speech_plus": _granite,
    "moonshine": _moonshine,
    "parakeet": _parakeet,
    "qwen3_asr": _qwen3_asr,
    "sensevoice": _sensevoice,
    "voxtral": _voxtral,
    "voxtral_realtime": _generated,
}
