"""Windows of Whisper, against mlx-audio's own loop over the same recording."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import pytest
from mlx_audio.stt.models.whisper.audio import log_mel_spectrogram

from backend.engine.speech import whisper
from backend.engine.speech.speech_builder import open_model
from backend.engine.speech.transcript import Segment, Speech, Transcribed
from backend.engine.speech.whisper import TEMPERATURES
from tests.engine.speech.conftest import opened
from tests.engine.speech.tiny_speech import speech, write_whisper

SECONDS = (0.005, 0.3, 12.0, 40.0)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second try: mlx-audio draws it with random numbers of another seed."""
    monkeypatch.setattr(whisper, "TEMPERATURES", (0.0,))


def heard(model: Any, given: Speech) -> list[Transcribed]:
    return [each for each in whisper.transcribe(model, given) if each is not None]


def segments(model: Any, given: Speech) -> list[Segment]:
    return [segment for each in heard(model, given) for segment in each.segments]


def reference(model: Any, given: Speech) -> Any:
    return model.generate(
        given.samples,
        temperature=0.0,
        fp16=False,
        language=given.language or None,
        task="translate" if given.translate else "transcribe",
        initial_prompt=given.prompt or None,
        word_timestamps=given.words,
    )


def written(found: list[Segment]) -> list[tuple[Any, ...]]:
    return [
        (
            round(each.start, 3),
            each.text,
            each.tokens,
            [(round(w.start, 3), round(w.end, 3), w.text) for w in each.words],
        )
        for each in found
    ]


def written_by(theirs: Any) -> list[tuple[Any, ...]]:
    return [
        (
            round(each["start"], 3),
            each["text"],
            tuple(each["tokens"]),
            [
                (round(w["start"], 3), round(w["end"], 3), w["word"])
                for w in each.get("words") or []
            ],
        )
        for each in theirs.segments
        if each["tokens"]
    ]


def require_equal(model: Any, given: Speech) -> None:
    expected, found = reference(model, given), heard(model, given)
    assert written([each for part in found for each in part.segments]) == written_by(expected)
    if not given.language:
        assert found[-1].language == expected.language


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("seconds", SECONDS[1:])
def test_its_tokens_and_times_are_those_of_mlx_audio(several: Any, seconds: float) -> None:
    require_equal(several, Speech(speech(seconds)))


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize(
    "given",
    [
        Speech(speech(8), language="de"),
        Speech(speech(8), language="de", translate=True),
        Speech(speech(35), language="en", prompt="w12 w13"),
        Speech(speech(35), language="en", words=True),
    ],
    ids=("language", "translate", "prompt", "words"),
)
def test_the_fields_of_a_request_reach_the_model(several: Any, given: Speech) -> None:
    require_equal(several, given)


@pytest.mark.usefixtures("greedy")
def test_control_tokens_in_a_prompt_are_left_out(several: Any) -> None:
    marked = "w12<|startoftranscript|><|0.00|> w13<|endoftext|>"
    given = [Speech(speech(3), language="en", prompt=prompt) for prompt in ("w12 w13", marked)]
    plain, other = [written(segments(several, each)) for each in given]
    assert plain == other


@pytest.mark.usefixtures("greedy")
def test_a_model_of_one_language_is_not_asked_which(english: Any) -> None:
    given = Speech(speech(5))
    require_equal(english, given)
    assert {each.language for each in heard(english, given)} == {"en"}


def test_a_recording_without_a_frame_has_no_text(several: Any) -> None:
    assert [each.segments for each in heard(several, Speech(speech(SECONDS[0])))] == [()]


def test_a_second_try_draws_the_same_tokens_beside_other_requests(several: Any) -> None:
    """The random numbers are those of the window, whatever is drawn between its tries."""
    first, second = Speech(speech(3)), Speech(speech(3, seed=1))
    alone = written(segments(several, first))
    turns = [whisper.transcribe(several, first), whisper.transcribe(several, second)]
    found: list[Segment] = []
    while turns:
        turn = turns.pop(0)
        try:
            each = next(turn)
        except StopIteration:
            continue
        turns.append(turn)
        if each is not None and turn.gi_frame.f_locals["speech"] is first:  # type: ignore[attr-defined]
            found += each.segments
    assert written(found) == alone


def test_if_every_try_is_bad_the_most_probable_text_is_returned(
    several: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of tests are not sure enough of any text to have its probability."""
    given = Speech(speech(3.0), language="en")
    monkeypatch.setattr(whisper, "TEMPERATURES", (0.4,))
    expected = heard(several, given)[0].segments
    decode = type(several).decode

    def improbable(model: Any, mel: mx.array, options: Any) -> Any:
        distance = abs(options.temperature - 0.4)
        return replace(decode(model, mel, options), avg_logprob=-2.0 - distance)

    monkeypatch.setattr(type(several), "decode", improbable)
    assert heard(several, given)[0].segments == expected
    monkeypatch.setattr(whisper, "TEMPERATURES", TEMPERATURES)
    assert heard(several, given)[0].segments == expected


def test_the_spectrum_of_several_blocks_is_that_of_mlx_audio() -> None:
    samples = speech(70.0)
    parts = whisper._spectrum(samples, 80)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            found, floor, frames = end.value
            break
    theirs = log_mel_spectrogram(samples, 80, padding=480_000)[:frames]
    assert frames == len(found) == len(theirs)
    assert mx.allclose((mx.maximum(found, floor) + 4) / 4, theirs, atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return write_whisper(tmp_path / "whisper")


def test_a_checkpoint_with_a_copy_of_its_embeddings_loads(folder: Path) -> None:
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    mx.save_safetensors(
        file, weights | {"proj_out.weight": weights["model.decoder.embed_tokens.weight"] + 0}
    )
    assert open_model(folder, "whisper").is_multilingual


def test_a_checkpoint_needs_only_its_tokenizer(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    assert open_model(folder, "whisper").get_tokenizer().encode("w12")


def test_a_tokenizer_without_tokens_of_times_gets_them(several: Any, folder: Path) -> None:
    given = Speech(speech(35.0), language="en", temperature=0.5)
    other = opened(write_whisper(folder, times=False))
    assert written(segments(other, given)) == written(segments(several, given))


def test_no_window_reads_the_whole_vocabulary(
    several: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_tokenizer: object) -> NoReturn:
        raise AssertionError("read again")

    monkeypatch.setattr(type(several._processor.tokenizer), "get_vocab", fail)
    assert heard(several, Speech(speech(3), language="en"))


def test_a_tokenizer_without_control_tokens_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|notimestamps|>", "<|other|>"))
    with pytest.raises(ValueError, match=r"does not have <\|0.00\|> after <\|notimestamps\|>"):
        open_model(folder, "whisper")


def test_heads_that_align_words_are_read_and_checked(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text('{"alignment_heads": [[1, 0], [0, 1]]}')
    assert open_model(folder, "whisper").alignment_heads.tolist() == [[1, 0], [0, 1]]
    file.write_text('{"alignment_heads": [[2, 0]]}')
    with pytest.raises(ValueError, match="names a head that is not there"):
        open_model(folder, "whisper")


def test_the_last_window_ends_with_the_recording(several: Any) -> None:
    given = Speech(speech(40.0), language="en", temperature=0.5)
    ends = [each.samples for each in heard(several, given)]
    assert ends == sorted(ends)
    assert ends[-1] == len(given.samples)
