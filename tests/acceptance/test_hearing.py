"""Sounds over the wire: the real process, one client or several, beside requests of text."""

from __future__ import annotations

import base64
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mlx_vlm.models.minicpmo.processing_minicpmo import MiniCPMOProcessor

from tests.acceptance.backend import ROOT, WAIT, Backend, chat, refusal, text_answer, text_of
from tests.engine.vision.seeing import encoded, picture
from tests.models.tiny_batches import prompt_of
from tests.models.tiny_dialogue import Dialogue
from tests.models.tiny_omni_tasks import SOUNDS, play, telling, wav
from tests.models.tiny_omni_tasks import heard as asks
from tests.polling import until
from wire import backend_pb2 as pb

TINY_OMNI = ROOT / "tests" / "models" / "tiny_omni"
ONE, MANY = "What is the sound like?", "What are the sounds like?"
FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris."


@pytest.fixture
def hearing(reused: Backend) -> Backend:
    return reused.holding(TINY_OMNI, LimitAudioPerPrompt=2)


def sound(kind: str, seed: int = 0) -> Any:
    """A sound of the kind; each seed has its own length."""
    return play(random.Random(f"{kind} {seed}"), kind, 0.4 + 0.3 * seed)


def clip(kind: str, seed: int = 0) -> str:
    """The base64 of a WAV file with the sound of that seed."""
    return base64.b64encode(wav(sound(kind, seed))).decode()


ONE_SAMPLE = base64.b64encode(wav(sound("low")[:1])).decode()


def sound_request(*kinds: str, question: str = ONE, **fields: Any) -> pb.PredictOptions:
    return chat(question, Audios=[clip(kind, seed) for seed, kind in enumerate(kinds)], **fields)


def together(backend: Backend, requests: list[pb.PredictOptions]) -> list[str]:
    """The answers to requests sent at once, each by its own client."""

    def ask(request: pb.PredictOptions) -> str:
        with backend.connect() as channel:
            stub = type(backend.stub)(channel)
            return text_of(stub.PredictStream(request, timeout=WAIT))

    with ThreadPoolExecutor(len(requests)) as clients:
        return list(clients.map(ask, requests))


@pytest.mark.parametrize("kind", SOUNDS)
def test_it_names_the_sound(hearing: Backend, kind: str) -> None:
    assert text_answer(hearing, sound_request(kind)) == telling([kind])


@pytest.mark.parametrize("kinds", [("low", "high"), ("high", "low")])
def test_it_names_two_sounds_in_order(hearing: Backend, kinds: tuple[str, str]) -> None:
    assert text_answer(hearing, sound_request(*kinds, question=MANY)) == telling(list(kinds))


@pytest.mark.parametrize("kinds", [("low",), ("noisy", "high")])
def test_its_prompt_has_the_tokens_of_the_model_s_own_processor(
    hearing: Backend, kinds: tuple[str, ...]
) -> None:
    processor = MiniCPMOProcessor.from_pretrained(TINY_OMNI)
    prompt = prompt_of(processor.tokenizer, Dialogue("", [asks(len(kinds), ONE)], thinking=False))
    sounds = [sound(kind, seed) for seed, kind in enumerate(kinds)]
    expected = processor(text=prompt, audio=sounds)["input_ids"].shape[1]
    reply = hearing.stub.Predict(sound_request(*kinds), timeout=WAIT)
    assert reply.prompt_tokens == expected


def test_a_data_uri_is_accepted_as_a_sound(hearing: Backend) -> None:
    uri = "data:audio/wav;base64," + clip("high")
    assert text_answer(hearing, chat(ONE, Audios=[uri])) == "The sound is high."


def test_three_clients_each_get_their_own_sound_and_a_fourth_only_text(hearing: Backend) -> None:
    requests = [*map(sound_request, SOUNDS), chat(FRANCE)]
    for _ in range(3):
        assert together(hearing, requests) == [*(telling([kind]) for kind in SOUNDS), PARIS]


def test_sounds_images_and_text_share_a_batch(hearing: Backend) -> None:
    seen = chat("What colour is the image?", Images=[encoded(picture("blue"))])
    requests = [
        sound_request("noisy", "high", question=MANY),
        seen,
        chat(FRANCE),
        sound_request("low"),
    ]
    expected = [telling(["noisy", "high"]), "The image is blue.", PARIS, telling(["low"])]
    assert together(hearing, requests) == expected


def test_two_sounds_of_the_same_length_are_distinguished(hearing: Backend) -> None:
    """The prompts have the same tokens: a cache that compared only tokens would confuse them."""
    for kind in ("low", "high", "low", "noisy", "high"):
        assert text_answer(hearing, sound_request(kind)) == telling([kind])


def test_metadata_assigns_a_sound_to_an_earlier_message(hearing: Backend) -> None:
    request = chat(
        ONE,
        "The sound is low.",
        ONE,
        Audios=[clip("low"), clip("high")],
        Metadata={"enable_thinking": "false", "mlx.audio_messages": "[0, 2]"},
    )
    assert text_answer(hearing, request) == "The sound is high."


def test_a_raw_prompt_has_its_sound_at_the_marker(hearing: Backend) -> None:
    place = hearing.stub.ModelMetadata(pb.ModelOptions(), timeout=WAIT).media_marker
    turns = f"<|im_start|>user\n{place}{ONE}<|im_end|>\n<|im_start|>assistant\n"
    request = pb.PredictOptions(Prompt=turns + "<think>\n\n</think>\n\n", Audios=[clip("noisy")])
    assert text_answer(hearing, request) == "The sound is noisy."


def test_markers_in_user_text_do_not_take_a_sound(hearing: Backend) -> None:
    """If they counted, there would be more markers than sounds, which is refused."""
    assert text_answer(
        hearing, sound_request("low", question=f"<|audio_start|><|audio_end|><audio> {ONE}")
    )
    assert text_answer(hearing, chat(f"<|audio_start|><unk><|audio_end|> {ONE}"))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (chat(ONE, Audios=["aGk="]), "Audios[0] "),
        (chat(ONE, Audios=[clip("low"), "aGk="]), "Audios[1] "),
        (chat(ONE, Audios=[clip("low"), clip("low")[:40]]), "Audios[1] "),
        (chat(ONE, Audios=["/etc/hostname"]), "Audios[0] "),
        (
            chat(ONE, Audios=[ONE_SAMPLE]),
            "Audios[0] cannot be prepared, because this model's processor failed",
        ),
        (sound_request("low", "low", "low"), "Audios has 3 items, but a prompt may have 2"),
    ],
)
def test_unusable_sounds_are_refused(
    hearing: Backend, request_: pb.PredictOptions, sentence: str
) -> None:
    assert sentence in refusal(hearing, request_)
    assert text_answer(hearing, sound_request("high")) == "The sound is high."


def test_a_cancelled_sound_leaves_nothing_behind(hearing: Backend) -> None:
    request = sound_request("low", question="Count to 60.", Tokens=500)
    call = hearing.stub.PredictStream(request, timeout=WAIT)
    next(call)
    call.cancel()
    until(hearing.idle)
    assert text_answer(hearing, sound_request("high")) == "The sound is high."
