"""Videos give the answers of mlx-vlm with the same frames, as a video or as images."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from backend.engine.errors import InvalidRequest
from backend.engine.media.items import Video
from backend.engine.media.video import decode_video
from backend.engine.request import Attachments, ChatPrompt, GenerationRequest, RawPrompt
from tests.engine.media.clips import BLUE, GREEN, H264, RED, in_base64, plain, saved
from tests.engine.vision.families import write_family
from tests.engine.vision.plain import AMONG_SIGNS, Message, PlainPasses, evenly
from tests.engine.vision.seeing import (
    ONE,
    TINY_VISION,
    answer_to,
    asking,
    encoded,
    picture,
    seeing,
    shown,
    turns,
)
from tests.long import TEST_LONG

TOKENS = 48
FRAMES = 6
SIZE = 96, 64
QUESTION, NEXT = "What happens?", "And then?"


@cache
def _clip(seed: int) -> bytes:
    """Twenty frames on which a bar moves over noise."""
    random = np.random.default_rng(seed)
    frames = [(one * 0.5).astype(np.uint8) for one in plain([BLUE] * 10 + [RED] * 10, SIZE)]
    for at, frame in enumerate(frames):
        frame += random.integers(0, 40, frame.shape, np.uint8)
        frame[:, 4 * at : 4 * at + 16] = GREEN
    return saved(frames, rate=4)


def _request(*texts: str, clip: int = 1) -> GenerationRequest:
    given = Attachments(videos=(in_base64(_clip(clip)),), video_messages=(0,))
    return asking(ChatPrompt(turns(*texts)), given, max_tokens=TOKENS, sampling=AMONG_SIGNS)


def _messages(texts: Sequence[str], *parts: dict[str, str]) -> list[Message]:
    first, *others = turns(*texts)
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": first["content"]}]},
        *others,
    ]


async def _compare(
    path: Path, plain_passes: PlainPasses, parts: Sequence[dict[str, str]], images: Sequence[Any]
) -> None:
    """Answers alone, from stored KV, in a batch and in a second turn equal the plain ones."""
    async with seeing(path, prefill_chunk=16, video_frames=FRAMES) as engine:
        assert "video" in engine.require_model().media
        alone = await answer_to(engine, _request(QUESTION))
        again = await answer_to(engine, _request(QUESTION))
        later = await answer_to(engine, _request(QUESTION, alone.text, NEXT))
        other = await answer_to(engine, _request(QUESTION, clip=2))
    async with seeing(path, video_frames=FRAMES) as engine:
        request = asking("Count to 30.", max_tokens=TOKENS, sampling=AMONG_SIGNS)
        beside, *_ = await asyncio.gather(
            *(answer_to(engine, one) for one in (_request(QUESTION), request, _request(NEXT)))
        )
    messages = _messages([QUESTION], *parts)
    for answer in (alone, again, beside):
        assert answer.prompt_tokens == plain_passes.prompt_tokens(messages, images)
        assert len(answer.tokens) == TOKENS
        assert answer.tokens == plain_passes.chooses(messages, images, answer.tokens)
    messages = _messages([QUESTION, alone.text, NEXT], *parts)
    assert later.tokens == plain_passes.chooses(messages, images, later.tokens)
    assert again.cached_tokens == alone.prompt_tokens - 1
    assert later.cached_tokens >= alone.prompt_tokens - 1
    assert other.prompt_tokens == alone.prompt_tokens
    assert other.cached_tokens < 20, "another clip of the same size is another prompt"
    assert other.logprobs != alone.logprobs


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", *(["qwen3_5"] if TEST_LONG else [])])
async def test_a_family_with_video_input_gets_videos(tmp_path: Path, family: str) -> None:
    native = family == "qwen3_vl"
    path = TINY_VISION if native else write_family(tmp_path / family, family)
    (clip := tmp_path / "clip.mp4").write_bytes(_clip(1))
    plain_passes = PlainPasses(path, clip=(clip, FRAMES))
    await _compare(path, plain_passes, [{"type": "video"}], ())


@pytest.mark.parametrize("family", ["idefics3", *(["gemma3"] if TEST_LONG else [])])
async def test_another_family_gets_the_frames_as_images(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / family, family)
    (clip := tmp_path / "clip.mp4").write_bytes(_clip(1))
    frames, _ = evenly(clip, FRAMES)
    images = [Image.fromarray(frame.transpose(1, 2, 0)) for frame in frames]
    await _compare(path, PlainPasses(path), [{"type": "image"}] * FRAMES, images)


async def test_the_model_names_what_is_in_the_image() -> None:
    red, blue = in_base64(saved(plain([RED] * 8))), in_base64(saved(plain([BLUE] * 8)))
    async with seeing() as engine:
        for clip, colour in ((red, "red"), (blue, "blue"), (red, "red")):
            answer = await answer_to(engine, asking(ONE, Attachments(videos=(clip,))))
            assert answer.text == f"The image is {colour}."
        raw = f"<|im_start|>user\n<__media__>{ONE}<|im_end|>\n<|im_start|>assistant\n"
        prompt = RawPrompt(f"{raw}<think>\n\n</think>\n\n")
        answer = await answer_to(engine, asking(prompt, Attachments(videos=(blue,))))
        assert answer.text == "The image is blue."


async def test_images_come_before_videos_each_in_its_message() -> None:
    first = encoded(picture("green"))
    clip = in_base64(saved(plain([RED] * 8)))
    both = ChatPrompt(
        turns(ONE, "The image is green.", ONE), template_arguments={"enable_thinking": False}
    )
    placed = Attachments((first,), videos=(clip,), image_messages=(0,), video_messages=(2,))
    turned = Attachments((first,), videos=(clip,), image_messages=(2,), video_messages=(0,))
    async with seeing() as engine:
        assert (await answer_to(engine, asking(both, placed))).text == "The image is red."
        assert (await answer_to(engine, asking(both, turned))).text == "The image is green."
        with pytest.raises(
            InvalidRequest, match=r"mlx\.video_messages has 0 entries, but Videos has 1"
        ):
            await answer_to(engine, asking(both, Attachments(videos=(clip,), video_messages=())))


async def test_an_option_sets_the_number_of_frames() -> None:
    async with seeing(video_frames=2) as few, seeing(video_frames=8) as many:
        given = Attachments(videos=(in_base64(H264),))
        counts = [(await answer_to(one, asking(ONE, given))).prompt_tokens for one in (few, many)]
        texts = [(await answer_to(one, asking(ONE))).prompt_tokens for one in (few, many)]
    assert texts[0] == texts[1] < counts[0] < counts[1]


async def test_an_invalid_video_ends_only_its_request() -> None:
    async with seeing() as engine:
        broken = asking(ONE, Attachments(videos=(in_base64(_clip(1)[:-400]),)))
        good = asking(ONE, shown("red"))
        refused, answer = await asyncio.gather(
            answer_to(engine, broken), answer_to(engine, good), return_exceptions=True
        )
    assert isinstance(refused, InvalidRequest)
    assert str(refused).startswith("Videos[0] cannot be decoded")
    assert not isinstance(answer, BaseException)
    assert answer.text == "The image is red."


async def test_an_image_overtakes_videos_that_are_slow_to_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def slow(*given: Any) -> Video:
        assert go_on.wait(60)
        return decode_video(*given)

    monkeypatch.setattr("backend.engine.media.decoding.decode_video", slow)
    async with seeing() as engine:
        given = Attachments(videos=(in_base64(H264),))
        waiting = [asyncio.create_task(answer_to(engine, asking(ONE, given))) for _ in range(3)]
        try:
            answer = await answer_to(engine, asking(ONE, shown("red")))
        finally:
            go_on.set()
        assert answer.text == "The image is red."
        assert all(one.text for one in await asyncio.gather(*waiting))
