"""A large JPEG is decoded at the size that is used, so the rest costs no memory."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from backend.engine.media.image import decode_image
from backend.engine.media.items import BadItem
from backend.engine.media.limits import MediaLimits
from backend.engine.units import MIB

ROOT = Path(__file__).parents[3]
SIDES = 12_000, 9_000
MOST = MediaLimits().image_pixels
READ = """
import json, sys
from backend.engine.media.image import decode_image
from common.peak_memory import peak_memory
content, most, used = open(sys.argv[1], "rb").read(), *json.loads(sys.argv[2])
before = peak_memory()
picture = decode_image(content, most, most, lambda: used)
print(json.dumps([picture.width, picture.height, peak_memory() - before]))
"""


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("large") / "photo.jpg"
    Image.linear_gradient("L").resize(SIDES).convert("RGB").save(path, "JPEG")
    return path


def cost(photo: Path, most: int, used: int | None) -> tuple[int, int, int]:
    """Width and height as decoded, and the memory used beyond the file's own bytes."""
    command = [sys.executable, "-c", READ, str(photo), json.dumps([most, used])]
    width, height, taken = json.loads(subprocess.check_output(command, cwd=ROOT))
    return width, height, taken


def test_a_photo_of_108_million_pixels_costs_only_what_is_used(photo: Path) -> None:
    whole = cost(photo, SIDES[0] * SIDES[1], None)
    print(f"whole: {whole[2] / MIB:.0f} MiB")
    assert whole[:2] == SIDES
    assert whole[2] > 400 * MIB
    for used, sides, most in (
        (None, (6000, 4500), 128),  # of at most 33,554,432 allowed
        (12_845_056, (6000, 4500), 128),  # Qwen2.5-VL, 14 x 14 x 65,536
        (13 * 448 * 448, (6000, 4500), 128),  # InternVL, twelve tiles and a thumbnail
        (1540 * 1540, (6000, 4500), 128),  # Pixtral
        (1456 * 1456, (6000, 4500), 128),  # Idefics3
        (1_003_520, (3000, 2250), 48),  # Qwen2-VL, by mlx-vlm's default
        (896 * 896, (3000, 2250), 48),  # Gemma 3
        (336 * 336, (1500, 1125), 24),  # LLaVA
    ):
        width, height, taken = cost(photo, MOST, used)
        print(f"{used} pixels used: {width} x {height}, {taken / MIB:.0f} MiB")
        assert (width, height) == sides, used
        assert taken < most * MIB, used


@pytest.mark.parametrize(("used", "size"), [(100 * 100, (300, 250)), (None, (2400, 2000))])
def test_the_decoded_picture_looks_the_same(used: int | None, size: tuple[int, int]) -> None:
    content = saved(2400, 2000)
    picture = decode_image(content, MOST, MOST, lambda: used)
    assert (picture.width, picture.height) == size
    whole = Image.open(BytesIO(content)).convert("RGB")
    small = (100, 80)
    seen, meant = (np.asarray(one.resize(small), float) for one in (picture.pixels, whole))
    assert np.abs(seen - meant).mean() < 2


def saved(width: int, height: int, **how: bool) -> bytes:
    file = BytesIO()
    image = Image.radial_gradient("L").resize((width, height)).convert("RGB")
    image.save(file, "JPEG", **how)
    return file.getvalue()


def test_a_format_that_cannot_be_decoded_by_rows_is_refused() -> None:
    with pytest.raises(BadItem, match="is 2400 x 2000 pixels, but an image may have 1000000"):
        decode_image(saved(2400, 2000, progressive=True), 1_000_000, 1_000_000)
    parts = bytearray(saved(2400, 2000))
    at = parts.index(b"\xff\xda")
    assert parts[at + 4] == 3
    parts[at + 3 : at + 12] = b"\x08\x01" + parts[at + 5 : at + 7] + parts[at + 11 : at + 14]
    with pytest.raises(BadItem, match="an image may have 1000000"):
        decode_image(bytes(parts), 1_000_000, 1_000_000)


def test_the_pixels_left_to_a_request_count() -> None:
    content = saved(2400, 2000)
    assert decode_image(content, 400_000, MOST).width == 600
    with pytest.raises(BadItem, match="of which 1000 are left"):
        decode_image(content, 1000, MOST)


def test_the_model_is_not_asked_about_an_image_of_usual_size() -> None:
    def unasked() -> int:
        raise AssertionError("the model was asked about an image of usual size")

    assert decode_image(saved(1200, 900), MOST, MOST, unasked).width == 1200
