"""Images over the wire: the real process, one client or several, with all features of text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.acceptance.backend import WAIT, Backend, chat, refusal, text_answer, text_of
from tests.engine.media.clips import BLUE, H264, RED, in_base64, lasting, plain, saved
from tests.engine.vision.seeing import MANY, ONE, TINY_VISION, encoded, picture
from tests.polling import until
from wire import backend_pb2 as pb

TOOLS = json.dumps([
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
])  # fmt: skip


@pytest.fixture
def sighted(reused: Backend) -> Backend:
    return reused.holding(TINY_VISION, LimitImagePerPrompt=3)


def seen(*colours: str, question: str = ONE, **fields: Any) -> pb.PredictOptions:
    images = [encoded(picture(colour, seed)) for seed, colour in enumerate(colours)]
    return chat(question, Images=images, **fields)


def test_it_names_the_colour_of_the_image(sighted: Backend) -> None:
    assert text_answer(sighted, seen("blue")) == "The image is blue."
    assert (
        text_answer(sighted, seen("red", "green", question=MANY)) == "The images are red and green."
    )


def test_a_data_uri_is_accepted_as_an_image(sighted: Backend) -> None:
    uri = "data:image/png;base64," + encoded(picture("orange"))
    assert text_answer(sighted, chat(ONE, Images=[uri])) == "The image is orange."


def test_four_clients_each_get_their_own_image_and_a_fifth_only_text(sighted: Backend) -> None:
    colours = ["yellow", "black", "purple", "white"]
    requests = [*map(seen, colours), chat("What is the capital of France?")]

    def ask(request: pb.PredictOptions) -> str:
        with sighted.connect() as channel:
            stub = type(sighted.stub)(channel)
            return text_of(stub.PredictStream(request, timeout=WAIT))

    with ThreadPoolExecutor(len(requests)) as clients:
        for _ in range(3):
            *answers, text = clients.map(ask, requests)
            assert answers == [f"The image is {colour}." for colour in colours]
            assert text == "The capital of France is Paris."


def test_a_stream_equals_the_unary_answer_with_seed_and_temperature(sighted: Backend) -> None:
    request = seen("pink", Temperature=0.8, Seed=3, Tokens=30)
    assert text_of(sighted.stub.PredictStream(request, timeout=WAIT)) == text_answer(
        sighted, request
    )


def test_stop_strings_logprobs_and_limits_work(sighted: Backend) -> None:
    reply = sighted.stub.Predict(seen("red", StopPrompts=[" is"], Logprobs=1), timeout=WAIT)
    assert reply.message == b"The image"
    assert json.loads(reply.logprobs)["content"]
    reply = sighted.stub.Predict(seen("red", Tokens=2), timeout=WAIT)
    assert reply.tokens == 2


def test_a_grammar_holds_for_an_answer_about_an_image(sighted: Backend) -> None:
    grammar = 'root ::= "The image is " ("red" | "blue" | "green") "!"'
    assert text_answer(sighted, seen("blue", Grammar=grammar)) == "The image is blue!"
    assert text_answer(sighted, seen("red", Grammar=grammar)) == "The image is red!"


def test_it_calls_tools_with_an_image_in_the_prompt(sighted: Backend) -> None:
    request = seen("red", question="What is the weather in Paris?", Tools=TOOLS)
    request.ToolChoice = "required"
    reply: pb.Reply = sighted.stub.Predict(request, timeout=WAIT)
    calls = [call for delta in reply.chat_deltas for call in delta.tool_calls]
    assert {call.name for call in calls if call.name} == {"get_weather"}


def test_it_thinks_about_an_image(sighted: Backend) -> None:
    request = seen("green", question="Think about the colour of the image.")
    request.Metadata["enable_thinking"] = "true"
    reply: pb.Reply = sighted.stub.Predict(request, timeout=WAIT)
    reasoning = "".join(delta.reasoning_content for delta in reply.chat_deltas)
    content = "".join(delta.content for delta in reply.chat_deltas)
    assert "green" in reasoning + content
    assert "<think>" not in content


def test_metadata_assigns_an_image_to_an_earlier_message(sighted: Backend) -> None:
    request = chat(
        ONE,
        "The image is purple.",
        "What colour is this?",
        Images=[encoded(picture(colour)) for colour in ("purple", "cyan")],
        Metadata={"enable_thinking": "false", "mlx.image_messages": "[0, 2]"},
    )
    assert text_answer(sighted, request) == "The image is cyan."


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (chat(ONE, Images=["aGk="]), "Images[0] "),
        (seen("red", "red", "red", "red"), "Images has 4 items, but a prompt may have 3"),
        (chat(ONE, Audios=["aGk="]), "Audios has 1 items, but this model accepts no audio"),
        (chat(ONE, Videos=["aGk="]), "Videos[0] is not in a known video format"),
        (chat(ONE, Images=["/etc/hostname"]), "Images[0] "),
        (chat(ONE, Images=["http://127.0.0.1/x.png"]), "Images[0] "),
    ],
)
def test_unusable_images_are_refused(
    sighted: Backend, request_: pb.PredictOptions, sentence: str
) -> None:
    assert sentence in refusal(sighted, request_)


def test_it_answers_about_a_video(sighted: Backend) -> None:
    for colour, name in ((RED, "red"), (BLUE, "blue")):
        request = chat(ONE, Videos=[in_base64(saved(plain([colour] * 8)))])
        reply: pb.Reply = sighted.stub.Predict(request, timeout=WAIT)
        assert reply.message.decode() == f"The image is {name}."
        count = chat(ONE, Videos=request.Videos)
        count.Metadata["mlx.count_only"] = "true"
        counted: pb.Reply = sighted.stub.Predict(count, timeout=WAIT)
        assert counted.prompt_tokens == reply.prompt_tokens > 40


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"It was a dark and stormy night.", "is not in a known video format"),
        (saved(plain([RED] * 8))[:-200], "cannot be decoded: it is broken or cut off"),
        (saved(plain([RED], (16400, 90)), "clip.avi", "mjpeg"), "a side may have at most 16384"),
        (lasting(saved(plain([RED] * 8)), 36_000), "lasts longer than 3600 seconds"),
        (H264[:8] + b"\xff" * 5000, "cannot be decoded"),
    ],
    ids=["text", "cut off", "wide", "ten hours", "broken"],
)
def test_a_hostile_video_is_refused_and_other_requests_continue(
    sighted: Backend, content: bytes, sentence: str
) -> None:
    stream = sighted.stub.PredictStream(chat("Count to 60.", Tokens=200), timeout=WAIT)
    next(stream)
    refused = refusal(sighted, chat(ONE, Videos=[in_base64(content)]))
    assert refused.startswith("Videos[0] ")
    assert sentence in refused
    assert text_of(stream)
    assert text_answer(sighted, seen("blue")) == "The image is blue."


def test_a_load_option_sets_how_many_videos_a_request_may_have(sighted: Backend) -> None:
    clips = [in_base64(saved(plain([RED] * 2)))] * 17
    assert "Videos has 17 items, but a prompt may have 16" in refusal(
        sighted, chat(ONE, Videos=clips)
    )


def test_the_error_names_the_broken_one_of_two_items(sighted: Backend) -> None:
    request = seen("red")
    request.Images.append("aGk=")
    assert refusal(sighted, request).startswith("Images[1] ")


def test_a_cancelled_image_leaves_nothing_behind(sighted: Backend) -> None:
    call = sighted.stub.PredictStream(
        seen("red", question="Count to 60.", Tokens=500), timeout=WAIT
    )
    next(call)
    call.cancel()
    until(sighted.idle)
    assert text_answer(sighted, seen("white")) == "The image is white."


def test_metadata_says_where_media_go_in_a_raw_prompt(sighted: Backend) -> None:
    metadata = sighted.stub.ModelMetadata(pb.ModelOptions(), timeout=WAIT)
    assert metadata.media_marker == "<__media__>"
    assert text_answer(sighted, _raw(metadata.media_marker)) == "The image is black."


def test_status_reports_cached_image_features(sighted: Backend) -> None:
    text_answer(sighted, seen("white"))
    status = sighted.stub.Status(pb.HealthMessage(), timeout=WAIT)
    assert status.memory.breakdown["media_features"] > 0


def _raw(marker: str) -> pb.PredictOptions:
    prompt = (
        f"<|im_start|>user\n{marker}{ONE}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    return pb.PredictOptions(Prompt=prompt, Images=[encoded(picture("black"))])


def test_its_text_part_alone_takes_no_image(bare: Backend) -> None:
    result = bare.load(TINY_VISION, Options=["type:text"])
    assert result.success, result.message
    assert "accepts only text" in refusal(bare, seen("red"))
    assert (
        text_answer(bare, chat("What is the capital of France?"))
        == "The capital of France is Paris."
    )
