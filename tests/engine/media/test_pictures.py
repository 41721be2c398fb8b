"""Every image of the corpus becomes the picture that people see, or a message that says why not."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from backend.engine.media.image import decode_image
from backend.engine.media.items import BadItem, DecodedImage
from backend.engine.media.limits import MediaLimits
from tests.engine.media.picture_corpus import BAD, GOOD, RED, Bad, Good, plain, save

pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:PIL\..*")
MOST = MediaLimits().image_pixels


def read(content: bytes) -> DecodedImage:
    return decode_image(content, MOST, MOST)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_good_image_has_its_size_and_its_colour(case: Good) -> None:
    picture = read(case.content)
    assert picture.pixels.mode == "RGB"
    assert (picture.width, picture.height) == picture.pixels.size == case.size
    mean = np.asarray(picture.pixels).reshape(-1, 3).mean(axis=0)
    assert np.abs(mean - case.colour).max() <= 3


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_image_is_refused_with_its_reason(case: Bad) -> None:
    with pytest.raises(BadItem, match=case.says) as caught:
        read(case.content)
    assert re.fullmatch(r"(is|has) .+", str(caught.value))
    assert not re.search(r"0x[0-9a-f]{6}|Traceback|\n", str(caught.value))


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_rotated_image_stands_upright(orientation: int) -> None:
    case = next(case for case in GOOD if case.name == f"turned {orientation}")
    pixels = read(case.content).pixels
    assert pixels.getpixel((20, 1)) == RED
    assert pixels.getpixel((20, 22)) == (0, 0, 255)


def test_the_digest_is_of_the_pixels_and_not_of_the_file() -> None:
    kinds = [read(save(plain(), kind)).digest for kind in ("PNG", "BMP", "GIF", "TIFF")]
    assert len(set(kinds)) == 1
    others = [plain(colour=(254, 0, 0)), plain(size=(24, 40))]
    assert len({*kinds, *(read(save(other, "PNG")).digest for other in others)}) == 3


def test_a_limit_may_be_reached_and_not_exceeded() -> None:
    exact = save(plain(size=(50, 20)), "PNG")
    assert decode_image(exact, 1000, 1000).width == 50
    with pytest.raises(BadItem, match="is 50 x 20 pixels, but an image may have 999 in all"):
        decode_image(exact, 999, 999)
    with pytest.raises(BadItem, match="may have 4000 in all, of which 999 are left"):
        decode_image(exact, 999, 1000)


def test_concurrent_threads_get_the_same_pictures() -> None:
    alone = [read(case.content).digest for case in GOOD]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: read(case.content).digest, GOOD * 3))
    assert together == alone * 3
