"""Transcriptions over the wire: by a model of speech, by one that accepts audio, and by neither."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import soundfile

from tests.acceptance.backend import ROOT, TINY_TEXT, WAIT, Backend
from tests.acceptance.test_hearing import ONE, clip
from tests.acceptance.test_hearing import sound as tone
from tests.engine.speech.tiny_speech import (
    speech,
    write_canary,
    write_granite,
    write_voxtral,
    write_whisper,
)
from tests.polling import until
from wire import backend_pb2 as pb

TINY_OMNI = ROOT / "tests" / "models" / "tiny_omni"
NANOSECONDS = 1_000_000_000


def recording(seconds: float, form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, speech(seconds), 16_000, format=form)
    return file.getvalue()


def asked(content: bytes, **fields: Any) -> pb.TranscriptRequest:
    return pb.TranscriptRequest(dst=base64.b64encode(content).decode(), **fields)


def refusal(backend: Backend, request: pb.TranscriptRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        backend.stub.AudioTranscription(request, timeout=WAIT)
    error: Any = refused.value
    return error.code(), error.details()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("tiny_whisper"))


@pytest.fixture
def whisper(reused: Backend, folder: Path) -> Backend:
    return reused.holding(folder)


@pytest.fixture
def omni(reused: Backend) -> Backend:
    return reused.holding(TINY_OMNI)


def test_a_load_says_what_was_loaded(bare: Backend, folder: Path) -> None:
    loaded = bare.load(folder)
    assert loaded.message == "loaded tiny_whisper0 (whisper, context 64 tokens)"


def test_a_host_s_file_becomes_segments_with_times(whisper: Backend, tmp_path: Path) -> None:
    file = tmp_path / "upload"
    file.write_bytes(recording(33.0, "MP3"))
    request = pb.TranscriptRequest(dst=str(file), temperature=0.4, threads=4, diarize=True)
    result = whisper.stub.AudioTranscription(request, timeout=WAIT)
    assert result.duration == pytest.approx(33.0, abs=0.1)
    assert result.language
    assert [segment.id for segment in result.segments] == list(range(len(result.segments)))
    assert "".join(segment.text for segment in result.segments).strip() == result.text
    times = [time for each in result.segments for time in (each.start, each.end)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= round(result.duration * NANOSECONDS)
    assert any(each.start > 20 * NANOSECONDS for each in result.segments), "of the second window"
    assert all(segment.tokens for segment in result.segments)


def test_a_stream_s_pieces_are_the_text(whisper: Backend) -> None:
    request = asked(recording(40.0), language="en", temperature=0.4)
    *parts, last = whisper.stub.AudioTranscriptionStream(request, timeout=WAIT)
    assert len(parts) > 1
    assert all(part.delta and not part.HasField("final_result") for part in parts)
    assert "".join(part.delta for part in parts) == last.final_result.text
    alone = whisper.stub.AudioTranscription(request, timeout=WAIT)
    assert last.final_result == alone


def test_words_have_times_if_they_are_requested(whisper: Backend) -> None:
    request = asked(
        recording(3.0), language="en", temperature=0.4, timestamp_granularities=["word"]
    )
    result = whisper.stub.AudioTranscription(request, timeout=WAIT)
    words = [word for segment in result.segments for word in segment.words]
    assert words
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 3 * NANOSECONDS


def test_the_process_answers_while_it_transcribes_and_after_a_cancel(
    whisper: Backend, tmp_path: Path
) -> None:
    file = tmp_path / "upload"
    file.write_bytes(recording(600.0))  # as an MP3, it would be encoded for seconds
    call = whisper.stub.AudioTranscriptionStream(pb.TranscriptRequest(dst=str(file)), timeout=WAIT)
    next(call)
    assert whisper.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"
    assert whisper.stub.Status(pb.HealthMessage(), timeout=WAIT).state == pb.StatusResponse.BUSY
    call.cancel()
    until(whisper.idle)


def test_a_language_has_a_name_a_code_or_a_region(whisper: Backend) -> None:
    for language in ("de", "German", "de-AT", "DE"):
        request = asked(recording(1.0), language=language, temperature=0.4)
        assert whisper.stub.AudioTranscription(request, timeout=WAIT).language == "de"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (pb.TranscriptRequest(), "dst is empty"),
        (asked(recording(1.0), prompt="a" * 4097), "prompt has 4097 characters: send at most 4096"),
        (pb.TranscriptRequest(dst="/nowhere/a.wav"), "dst is a path, but not of a readable file"),
        (asked(b"GIF89a and more"), "dst is in the format GIF"),
        (
            asked(recording(1.0), language="xx"),
            "language is 'xx', which this model does not support",
        ),
        (asked(recording(1.0), temperature=-1), "temperature is -1"),
        (
            asked(recording(1.0), timestamp_granularities=["day"]),
            "timestamp_granularities has 'day'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    whisper: Backend, request_: pb.TranscriptRequest, said: str
) -> None:
    code, details = refusal(whisper, request_)
    assert (code, details[: len(said)]) == (grpc.StatusCode.INVALID_ARGUMENT, said)


def test_a_request_for_another_model_is_refused(whisper: Backend) -> None:
    code, details = refusal(whisper, asked(recording(1.0), ModelIdentity="other"))
    assert code == grpc.StatusCode.NOT_FOUND
    assert "model identity mismatch" in details


def test_a_model_of_speech_says_that_it_answers_nothing_else(whisper: Backend) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        whisper.stub.Predict(pb.PredictOptions(Prompt="hello"), timeout=WAIT)
    error: Any = refused.value
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "turns speech into text" in error.details()


@pytest.mark.parametrize("write", [write_canary, write_granite, write_voxtral])
def test_other_families_transcribe_what_they_can(
    write: Callable[[Path], Path], bare: Backend, tmp_path: Path
) -> None:
    assert bare.load(write(tmp_path / "model")).success
    translates = write is not write_voxtral
    result = bare.stub.AudioTranscription(
        asked(recording(31.0), language="German", translate=translates), timeout=WAIT
    )
    assert result.text
    assert result.language == "de"
    assert [segment.start > 0 for segment in result.segments] == [False, True]
    code, details = refusal(bare, asked(recording(1.0), timestamp_granularities=["word"]))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "this model does not report the times of words" in details
    if not translates:
        code, details = refusal(bare, asked(recording(1.0), translate=True))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "load a multilingual Whisper, a Granite Speech or a Canary model" in details
        assert details.endswith("or ask for a transcription")  # /audio/translations has no flag


def test_a_model_that_accepts_audio_is_asked(omni: Backend) -> None:
    request = pb.TranscriptRequest(dst=clip("high"), prompt=ONE)
    result = omni.stub.AudioTranscription(request, timeout=WAIT)
    assert result.text == "The sound is high."
    assert [segment.text for segment in result.segments] == [result.text]
    assert result.segments[0].end == pytest.approx(result.duration * NANOSECONDS, rel=1e-6)


def test_a_longer_recording_is_asked_about_in_pieces(omni: Backend) -> None:
    import numpy as np

    file = io.BytesIO()
    long = np.concatenate(
        [np.resize(tone("low"), 25 * 16_000), np.resize(tone("high"), 20 * 16_000)]
    )
    soundfile.write(file, long, 16_000, format="WAV")
    request = asked(file.getvalue(), prompt=ONE)
    *parts, last = omni.stub.AudioTranscriptionStream(request, timeout=WAIT)
    result = last.final_result
    assert len(result.segments) == 2
    assert result.segments[0].end == result.segments[1].start
    assert "".join(part.delta for part in parts) == result.text


def test_a_recording_that_is_too_short_for_the_model_is_named_as_the_host_sent_it(
    omni: Backend,
) -> None:
    code, details = refusal(omni, asked(recording(0.0005)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("dst cannot be prepared")


def test_a_model_without_audio_says_what_serves_it(served: Backend) -> None:
    code, details = refusal(served.holding(TINY_TEXT), asked(recording(1.0)))
    assert code == grpc.StatusCode.UNIMPLEMENTED
    assert details == (
        "AudioTranscription is not served: the loaded model 'tiny_text' generates text and accepts"
        " no audio; load a speech-to-text model (Whisper, Parakeet, Qwen3-ASR, Voxtral, Granite"
        " Speech, GLM-ASR, Moonshine, Canary, SenseVoice), or a model that accepts audio"
    )
