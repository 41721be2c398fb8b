"""A large JPEG is decoded at the size that a family's processor uses, with as many tokens."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from backend.engine.media import decoding
from backend.engine.media.image import decode_image
from backend.engine.media.items import DecodedImage
from backend.engine.request import Attachments
from tests.engine.vision.families import write_family
from tests.engine.vision.seeing import TINY_VISION, answer_to, asking, seeing

SIDES, EIGHTH = (4000, 3000), (500, 375)


def _encoded(form: str) -> str:
    file = BytesIO()
    Image.linear_gradient("L").resize(SIDES).convert("RGB").save(file, form)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen2_5_vl", "gemma3", "idefics3", "internvl_chat", "ministral3"]
)
async def test_a_jpeg_of_twelve_million_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    decoded: list[DecodedImage] = []

    def watched(*given: Any) -> DecodedImage:
        decoded.append(decode_image(*given))
        return decoded[-1]

    monkeypatch.setattr(decoding, "decode_image", watched)
    native = family == "qwen3_vl"
    path = TINY_VISION if native else write_family(tmp_path / family, family)
    async with seeing(path) as engine:
        small, whole = [
            await answer_to(
                engine, asking("What is it?", Attachments((_encoded(form),)), max_tokens=1)
            )
            for form in ("JPEG", "PNG")
        ]
    assert small.prompt_tokens == whole.prompt_tokens
    assert [(one.width, one.height) for one in decoded] == [EIGHTH, SIDES]
