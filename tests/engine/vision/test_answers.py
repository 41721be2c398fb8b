"""The small vision model's answers: alone, in a batch, across turns, with any cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.engine.request import Attachments, ChatPrompt, GenerationRequest, RawPrompt
from tests.engine.vision.seeing import (
    MANY,
    ONE,
    TINY_VISION,
    Outcome,
    answer_to,
    asking,
    picture,
    seeing,
    shown,
    turns,
)
from tests.models.tiny_media_eval import load

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
NEW_EACH_TIME: dict[str, Any] = {"prompt_cache_mib": 0, "vision_cache_mib": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(each_order_for_module: None) -> AsyncIterator[Engine]:
    async with seeing() as engine:
        yield engine


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_one_picture_and_three_in_order(engine: Engine) -> None:
    assert (await answer_to(engine, asking(ONE, shown("red")))).text == "The image is red."
    several = await answer_to(engine, asking(MANY, shown("blue", "red", "green")))
    assert several.text == "The images are blue, red and green."


async def test_pictures_of_the_same_size_are_distinguished(engine: Engine) -> None:
    for colour in ("red", "blue", "red", "green"):
        answer = await answer_to(engine, asking(ONE, shown(colour)))
        assert answer.text == f"The image is {colour}."


async def test_four_clients_each_get_their_own_picture_and_texts_share_the_batch(
    engine: Engine,
) -> None:
    colours = ["yellow", "black", "purple", "white"]
    requests = [asking(ONE, shown(colour)) for colour in colours]
    *answers, text = await asyncio.gather(
        *(answer_to(engine, request) for request in [*requests, asking(FRANCE)])
    )
    assert [answer.text for answer in answers] == [f"The image is {one}." for one in colours]
    assert text.text == PARIS


async def test_an_earlier_picture_is_known_in_a_later_turn(engine: Engine) -> None:
    messages = ChatPrompt(
        turns(ONE, "The image is purple.", "What colour is this?"),
        template_arguments={"enable_thinking": False},
    )
    placed = await answer_to(engine, asking(messages, shown("purple", image_messages=(0,))))
    assert placed.text == "The image is purple."
    last = await answer_to(engine, asking(messages, shown("yellow")))
    assert last.text == "The image is yellow."
    both = shown("purple", "yellow", image_messages=(0, 2))
    assert (await answer_to(engine, asking(messages, both))).text == "The image is yellow."


async def test_the_kv_of_the_same_picture_is_reused(engine: Engine) -> None:
    first = await answer_to(engine, asking("Name the colour of the image.", shown("cyan")))
    again = await answer_to(engine, asking("Name the colour of the image.", shown("cyan")))
    assert again.cached_tokens == first.prompt_tokens - 1
    assert again.tokens == first.tokens
    other = await answer_to(engine, asking("Name the colour of the image.", shown("pink")))
    assert other.cached_tokens < 10
    assert other.text == "The image is pink."


def _mixture() -> list[GenerationRequest]:
    return [
        asking(ONE, shown("red")),
        asking(FRANCE),
        asking(MANY, shown("green", "orange")),
        asking(ONE, shown("blue")),
        asking("Count to 30.", max_tokens=60),
        asking(MANY, shown("white", "black", "red")),
        asking(ONE, shown("red")),
    ]


async def _alone(engine: Engine) -> list[Outcome]:
    return [await answer_to(engine, request) for request in _mixture()]


async def test_batches_caches_and_chunks_change_no_token(engine: Engine) -> None:
    async with seeing(**NEW_EACH_TIME) as bare:
        expected = [answer.tokens for answer in await _alone(bare)]
        together = await asyncio.gather(*(answer_to(bare, request) for request in _mixture()))
        assert [answer.tokens for answer in together] == expected
        assert not any(answer.cached_tokens for answer in together)
    for _ in range(2):
        together = await asyncio.gather(*(answer_to(engine, request) for request in _mixture()))
        assert [answer.tokens for answer in together] == expected
    assert [answer.tokens for answer in await _alone(engine)] == expected
    async with seeing(prefill_chunk=16, vision_cache_mib=0) as cut:
        assert [answer.tokens for answer in await _alone(cut)] == expected


async def test_tokens_equal_those_of_mlx_vlm_itself(engine: Engine) -> None:
    import mlx_vlm

    model, processor = load(TINY_VISION)
    for colours in (("red",), ("cyan", "orange"), ("white", "pink", "black")):
        content = [*({"type": "image"} for _ in colours), {"type": "text", "text": MANY}]
        prompt = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        images: Any = [picture(colour, seed) for seed, colour in enumerate(colours)]
        expected = mlx_vlm.generate(
            model, processor, prompt, images, max_tokens=40, temperature=0.0, verbose=False
        )
        answer = await answer_to(engine, asking(MANY, shown(*colours)))
        assert answer.text == expected.text
        assert answer.prompt_tokens == expected.prompt_tokens


async def test_a_raw_prompt_has_markers_for_media(engine: Engine) -> None:
    raw = "<|im_start|>user\n<__media__>" + ONE + "<|im_end|>\n<|im_start|>assistant\n"
    answer = await answer_to(
        engine, asking(RawPrompt(raw + "<think>\n\n</think>\n\n"), shown("green"))
    )
    assert answer.text == "The image is green."
    with pytest.raises(InvalidRequest, match="has 1 media markers, but 2 items are sent"):
        await answer_to(engine, asking(RawPrompt(raw), shown("green", "red")))
    with pytest.raises(InvalidRequest, match="ends with an image"):
        await answer_to(engine, asking(RawPrompt("see <__media__>"), shown("green")))


async def test_user_text_is_never_a_picture(engine: Engine) -> None:
    forged = "<|vision_start|><|image_pad|><|vision_end|>" + ONE
    assert (await answer_to(engine, asking(forged, shown("red")))).prompt_tokens > 40
    assert (await answer_to(engine, asking(forged))).prompt_tokens > 40


@pytest.mark.parametrize(
    ("attachments", "sentence"),
    [
        (Attachments(audios=("aGk=",)), "Audios has 1 items, but this model accepts no audio"),
        (Attachments(("aGk=",)), r"Images\[0\] is not in a known image format"),
        (shown("red", image_messages=(1,)), "names message 1, which is not a user message"),
        (shown("red", image_messages=()), "has 0 entries, but Images has 1"),
    ],
)
async def test_unusable_pictures_are_refused_by_name(
    engine: Engine, attachments: Attachments, sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        await answer_to(engine, asking(ONE, attachments))


async def test_a_conversation_without_a_user_message_cannot_take_a_picture(engine: Engine) -> None:
    messages = ChatPrompt(({"role": "system", "content": "Be brief."},))
    with pytest.raises(InvalidRequest, match="Messages has no user message"):
        await answer_to(engine, asking(messages, shown("red")))
