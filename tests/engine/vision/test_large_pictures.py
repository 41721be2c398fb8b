"""A large JPEG is decoded at the size that a family's processor uses, and stands for as much."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from backend.engine.media import decoding
from backend.engine.media.items import Picture
from backend.engine.request import Attachments
from tests.engine.vision.families import write_family
from tests.engine.vision.seeing import TINY_VISION, asking, said, seeing

SIDES = 4000, 3000


def _encoded(form: str) -> str:
    file = BytesIO()
    Image.linear_gradient("L").resize(SIDES).convert("RGB").save(file, form)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("family", "sides"),
    [
        ("qwen3_vl", (500, 375)),  # 64 x 64 by its configuration
        ("gemma3", (500, 375)),  # 56 x 56
        ("idefics3", (1000, 750)),
        ("internvl_chat", (1000, 750)),
        ("ministral3", (500, 375)),
    ],
)
async def test_a_jpeg_of_twelve_million_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, sides: tuple[int, int]
) -> None:
    decoded: list[Picture] = []
    read = decoding.decode_picture

    def watched(*given: object) -> Picture:
        decoded.append(read(*given))  # type: ignore[arg-type]
        return decoded[-1]

    monkeypatch.setattr(decoding, "decode_picture", watched)
    native = family == "qwen3_vl"
    path = TINY_VISION if native else write_family(tmp_path / family, family)
    async with seeing(path) as engine:
        small, whole = [
            await said(engine, asking("What is it?", Attachments((_encoded(form),)), max_tokens=1))
            for form in ("JPEG", "PNG")
        ]
    assert small.prompt_tokens == whole.prompt_tokens
    assert [(one.width, one.height) for one in decoded] == [sides, SIDES]
