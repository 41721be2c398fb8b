"""Serves AudioTranscription with a speech-to-text model, or a chat model that accepts audio.

A chat model gets the recording in pieces of 30 seconds, each in a separate conversation; the times
in the result are those of the pieces.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

from backend.engine.engine import Engine
from backend.engine.errors import Cancelled, InvalidRequest, WrongKind
from backend.engine.events import Finished
from backend.engine.served_model import ServedModel
from backend.engine.speech.transcript import Segment, Speech, SpeechAbilities, Transcribed, Word
from backend.engine.vision.media_plan import AUDIO
from backend.rpc.answer import Answer
from backend.rpc.call_log import note_usage
from backend.rpc.checks import require_most
from common.chat_events import Content
from common.field_names import named, renamed
from common.model_kind import SPEECH_FAMILIES
from common.wording import shown
from wire import backend_pb2 as pb

if TYPE_CHECKING:
    import numpy as np

_NANOSECONDS = 1_000_000_000
_GRANULARITIES = ("segment", "word")
_MOST_TOKENS = 1024  # in an answer about 30 seconds
_HOTTEST = 100.0
_LONGEST_PROMPT = 4096  # characters; Whisper reads the last 223 tokens
_SERVED_BY = f"load a speech-to-text model ({SPEECH_FAMILIES}), or a model that accepts audio"


async def transcribe(
    engine: Engine, request: pb.TranscriptRequest
) -> AsyncGenerator[str | pb.TranscriptResult, None]:
    """Yield the text in pieces, and the result at the end. Raises WrongKind, InvalidRequest, …."""
    from backend.engine.media.items import AUDIO_RATE

    served = engine.require_model()
    if served.speech is None and AUDIO not in served.media:
        raise WrongKind(
            f"{named('AudioTranscription')} is not served: the loaded model"
            f" {shown(served.public_name)}"
            f" {served.kind.words} and accepts no audio; {_SERVED_BY}"
        )
    abilities = served.speech or SpeechAbilities(translates=True, samples=True)
    _require_transcribable(request, abilities)
    if served.speech:
        require_most("prompt", request.prompt, _LONGEST_PROMPT, "characters")
    language = _language(request.language, abilities if served.speech else None)
    segments: list[Segment] = []
    text = ""
    async with engine.recording(request.dst) as samples:
        request.ClearField("dst")  # it may be large, and transcribing may take long
        _require_unchanged(engine, served)
        pieces = (
            _by_speech_model(engine, request, language, samples)
            if served.speech
            else _by_prompts(engine, served, request, language, samples)
        )
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Transcribed):
                    segments += piece.segments
                    language = language or piece.language
                elif delta := piece if text else piece.lstrip():
                    text += delta
                    yield delta
        seconds = len(samples) / AUDIO_RATE
    yield pb.TranscriptResult(
        segments=_on_the_wire(segments, seconds), text=text, language=language, duration=seconds
    )


async def _by_speech_model(
    engine: Engine, request: pb.TranscriptRequest, language: str, samples: np.ndarray
) -> AsyncGenerator[str | Transcribed, None]:
    speech = Speech(
        samples,
        language,
        request.prompt,
        request.temperature,
        request.translate,
        "word" in request.timestamp_granularities,
    )
    async with engine.transcribe(speech) as transcription:
        async for event in transcription:
            if isinstance(event, Transcribed):
                for segment in event.segments:
                    yield segment.text
                yield event
            elif isinstance(event, Finished):
                note_usage(event.usage)


async def _by_prompts(
    engine: Engine,
    served: ServedModel,
    request: pb.TranscriptRequest,
    language: str,
    samples: np.ndarray,
) -> AsyncGenerator[str | Transcribed, None]:
    """Ask for a transcript of each piece, with llama.cpp's prompt or that of the request."""
    from backend.engine.media.items import AUDIO_RATE
    from backend.engine.speech.windows import windows

    asked = request.prompt or "Transcribe audio to text"
    asked += f" (language: {language})" if language else ""
    asked += " (translate it into English)" if request.translate else ""
    for start, end in windows(samples):
        options = pb.PredictOptions(
            Messages=[pb.Message(role="user", content=asked)],
            UseTokenizerTemplate=True,
            Audios=[await asyncio.to_thread(_wav, samples[start:end])],
            Temperature=request.temperature,
            Tokens=_MOST_TOKENS,
            Metadata={"enable_thinking": "false"},
        )
        _require_unchanged(engine, served)
        text = ""
        with _naming_the_recording():
            async with aclosing(Answer(engine, options, served).events()) as events:
                async for _, parts in events:
                    for part in parts:
                        if isinstance(part, Content) and part.text:
                            delta = part.text if text or not start else f" {part.text.lstrip()}"
                            text += delta
                            yield delta
        yield Transcribed(
            (Segment(start / AUDIO_RATE, end / AUDIO_RATE, text),) if text.strip() else ()
        )


@contextmanager
def _naming_the_recording() -> Iterator[None]:
    """Name `dst` in an error about the audio of a request that this module has made."""
    try:
        yield
    except InvalidRequest as error:
        names = {"Audios[0]": "dst"}
        error.message = renamed(error.message, lambda name: names.get(name, name))
        error.fields = tuple(names.get(name, name) for name in error.fields)
        raise


def _require_unchanged(engine: Engine, served: ServedModel) -> None:
    """Raise Cancelled if another model has been loaded since the request began, or NotLoaded."""
    if engine.require_model().epoch != served.epoch:
        raise Cancelled("another model was loaded")


def _wav(samples: np.ndarray) -> str:
    """Return the base64 of a WAV file with these samples as they are."""
    import soundfile

    from backend.engine.media.items import AUDIO_RATE

    file = BytesIO()
    soundfile.write(file, samples, AUDIO_RATE, "FLOAT", format="WAV")
    return base64.b64encode(file.getvalue()).decode()


def _require_transcribable(request: pb.TranscriptRequest, abilities: SpeechAbilities) -> None:
    """Refuse what the model cannot do. Raises InvalidRequest."""
    if not request.dst:
        raise InvalidRequest(f"{named('dst')} is empty: send a recording")
    if not (0 <= request.temperature <= _HOTTEST) or not math.isfinite(request.temperature):
        raise InvalidRequest(
            f"{named('temperature')} is {request.temperature:g}: send 0 to {_HOTTEST:g}"
        )
    if request.temperature and not abilities.samples:
        raise InvalidRequest(
            f"{named('temperature')} is {request.temperature:g}, but this model chooses the most"
            " likely text only: send 0"
        )
    if request.translate and not abilities.translates:
        raise InvalidRequest(
            f"{named('translate')} is true, but this model does not translate: load a multilingual"
            " Whisper, a Granite Speech or a Canary model, or ask for a transcription"
        )
    for word in request.timestamp_granularities:
        if word not in _GRANULARITIES:
            raise InvalidRequest(
                f"{named('timestamp_granularities')} has {shown(word)}: send segment or word"
            )
    if "word" in request.timestamp_granularities and not abilities.times_words:
        raise InvalidRequest(
            f"{named('timestamp_granularities')} has word, but this model does not report the times"
            " of words: send segment, or load a Whisper or Parakeet model"
        )


def _language(given: str, abilities: SpeechAbilities | None) -> str:
    """Return the code of a language; '' if the model detects it. Raises InvalidRequest.

    abilities: None for a model whose prompt contains the name of the language.
    """
    word = given.strip()
    code = word.lower().replace("_", "-").partition("-")[0]
    if code == "auto":
        return ""
    if abilities is None or not word:
        return word
    if not abilities.languages:
        return code
    known = abilities.languages.get(word.lower()) or abilities.languages.get(code)
    if known is None:
        codes = sorted(set(abilities.languages.values()))
        raise InvalidRequest(
            f"{named('language')} is {shown(given)}, which this model does not support: send a code"
            f" such as {', '.join(codes[:8])}, or leave it out"
        )
    return known


def _on_the_wire(segments: Sequence[Segment], seconds: float) -> list[pb.TranscriptSegment]:
    """Return segments and words in order and within the recording, as subtitles have to be.

    seconds: the length of the recording, which the times of a model may exceed.
    """
    last = round(seconds * _NANOSECONDS)

    def times(part: Segment | Word, earliest: int) -> tuple[int, int]:
        start, end = (round(each * _NANOSECONDS) for each in (part.start, part.end))
        start = min(max(start, earliest), last)
        return start, min(max(start, end), last)

    found: list[pb.TranscriptSegment] = []
    spoken = 0
    for index, segment in enumerate(segments):
        start, end = times(segment, found[-1].end if found else 0)
        found.append(
            pb.TranscriptSegment(
                id=index, start=start, end=end, text=segment.text, tokens=segment.tokens
            )
        )
        for word in segment.words:
            start, spoken = times(word, spoken)
            found[-1].words.add(start=start, end=spoken, text=word.text.strip())
    return found
