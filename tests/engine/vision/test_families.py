"""Families that differ in positions, windows, recurrent state, tiles: the tokens are mlx-vlm's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vision.families import write_family
from tests.engine.vision.seeing import MANY, asking, picture, said, seeing, shown
from tests.models.tiny_vision_eval import load

SHOWN = (("red",), ("blue", "green"), ("white",))
TOKENS = 12


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
