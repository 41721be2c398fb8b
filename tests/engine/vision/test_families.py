"""Families that differ in positions, windows, recurrent state, tiles: the tokens are mlx-vlm's."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from backend.engine.request import Attachments
from tests.engine.vision.families import write_family
from tests.engine.vision.seeing import MANY, asking, picture, said, seeing, shown, tone
from tests.models.tiny_media_eval import load

SHOWN = (("red",), ("blue", "green"), ("white",))
TOKENS = 12
CLOSE = 1e-4  # log-probabilities in another order of summation


def _expected(path: Path) -> list[tuple[int, tuple[int, ...]]]:
    """Prompt tokens and what mlx-vlm's own generation says, for each of SHOWN."""
    import mlx_vlm

    model, processor = load(path)
    answers = []
    for colours in SHOWN:
        content = [*({"type": "image"} for _ in colours), {"type": "text", "text": MANY}]
        prompt = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        images: Any = [picture(colour, seed) for seed, colour in enumerate(colours)]
        parts = [
            *mlx_vlm.stream_generate(
                model, processor, prompt, images, max_tokens=TOKENS, temperature=0.0
            )
        ]
        told = tuple(int(part.token) for part in parts if part.token is not None)
        answers.append((int(parts[-1].prompt_tokens), told[:TOKENS]))
    return answers


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "gemma3", "idefics3"])
async def test_a_family_says_what_mlx_vlm_says(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path / family, family)
    expected = _expected(path)
    requests = [asking(MANY, shown(*colours), max_tokens=TOKENS) for colours in SHOWN]
    text = asking("Count to 3.", max_tokens=TOKENS)
    async with seeing(path, prefill_chunk=16) as engine:
        alone = [await said(engine, request) for request in requests]
        together = await asyncio.gather(*(said(engine, one) for one in [*requests, text]))
    for (prompt_tokens, tokens), first, second in zip(expected, alone, together, strict=False):
        assert first.prompt_tokens == prompt_tokens
        assert first.tokens == tokens[: len(first.tokens)]
        assert second.tokens == first.tokens
        assert second.cached_tokens == prompt_tokens - 1


async def test_sounds_are_heard_beside_images_and_texts(tmp_path: Path) -> None:
    path = write_family(tmp_path / "minicpmo", "minicpmo")
    sounds = [tone(220), tone(2000)]
    requests = [
        asking("What is it?", Attachments(audios=(sounds[0],)), max_tokens=TOKENS),
        asking("What is it?", Attachments(audios=(sounds[1],)), max_tokens=TOKENS),
        asking("What is it?", Attachments(audios=(sounds[1], sounds[0])), max_tokens=TOKENS),
        asking("What is it?", shown("red"), max_tokens=TOKENS),
        asking("What is it?", Attachments(shown("red").images, (sounds[0],)), max_tokens=TOKENS),
        asking("What is it?", max_tokens=TOKENS),
    ]
    async with seeing(path, prompt_cache_mib=0, vision_cache_mib=0) as engine:
        assert engine.require_model().media == {"image", "audio"}
        alone = [await said(engine, request) for request in requests]
        assert alone[0].prompt_tokens == alone[1].prompt_tokens
        heard = sorted(sum(answer.logprobs) for answer in alone)
        assert min(b - a for a, b in itertools.pairwise(heard)) > 10 * CLOSE
        together = await asyncio.gather(*(said(engine, request) for request in requests))
        for first, second in zip(alone, together, strict=True):
            assert second.logprobs == pytest.approx(first.logprobs, abs=CLOSE)
    async with seeing(path) as engine:
        for _ in range(2):
            again = [await said(engine, request) for request in requests]
            for first, second in zip(alone, again, strict=True):
                assert second.logprobs == pytest.approx(first.logprobs, abs=CLOSE)
        assert again[1].cached_tokens == again[1].prompt_tokens - 1
