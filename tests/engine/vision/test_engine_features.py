"""Features of the text engine on a vision model: caches, drafts, scores, vectors, refusals."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from backend.engine.embedding.readers import TextReader
from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.executing.score_plan import ScoreRequest
from backend.engine.load_request import AdapterRequest, LoadRequest
from backend.engine.request import Attachments, Sampling
from backend.engine.vision import media_prefill
from backend.engine.vision.features import Features, encode
from backend.engine.vision.media_plan import MediaItem, MediaPlan, Span
from backend.engine.vision.media_prefill import parts_of
from tests.engine.loading_models import read_weights
from tests.engine.vision.seeing import (
    MANY,
    ONE,
    TINY_VISION,
    answer_to,
    asking,
    encoded,
    seeing,
    shown,
)

COUNTING = "Count to 30."


async def _rejected(**fields: Any) -> str:
    engine = Engine()
    engine.start()
    try:
        with pytest.raises((ModelRejected, InvalidRequest)) as caught:
            await engine.load(LoadRequest("it", **fields))
        return str(caught.value)
    finally:
        await engine.stop(10)


async def test_the_kv_of_texts_is_saved_to_disk_and_that_of_pictures_is_not(tmp_path: Path) -> None:
    long = f"{COUNTING} {'And then again, please. ' * 12}"
    async with seeing(prompt_cache_dir=str(tmp_path)) as first:
        expected = await answer_to(first, asking(long))
        await answer_to(first, asking(long, shown("red")))
        await first.free()
    async with seeing(prompt_cache_dir=str(tmp_path), prompt_cache_mib=0) as second:
        assert (await answer_to(second, asking(long, shown("red")))).cached_tokens == 0
        again = await answer_to(second, asking(long))
        assert again.cached_tokens > 32
        assert again.tokens == expected.tokens


async def test_a_quantised_kv_cache_still_shows_the_picture() -> None:
    async with seeing(kv_bits=8, kv_group_size=32) as engine:
        requests = [asking(ONE, shown("red")), asking(MANY, shown("blue", "green"))]
        answers = await asyncio.gather(*(answer_to(engine, request) for request in requests))
        assert [answer.text for answer in answers] == [
            "The image is red.",
            "The images are blue and green.",
        ]


async def test_an_encoding_may_take_longer_than_other_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[int] = []

    async with seeing(prompt_cache_mib=0) as engine:

        def watching(model: Any, item: MediaItem) -> Features:
            limits.append(engine.heartbeat.limit)
            return encode(model, item)

        monkeypatch.setattr(media_prefill, "encode", watching)
        assert engine.loaded is not None
        least, most, _ = engine.loaded.step_timeout
        await answer_to(engine, asking(COUNTING))
        assert engine.heartbeat.limit == least
        await answer_to(engine, asking(ONE, shown("red")))
        assert limits == [most]


async def test_a_picture_is_encoded_once_for_each_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[bytes] = []

    def counting(model: Any, item: MediaItem) -> Features:
        encoded.append(item.digest)
        return encode(model, item)

    async with seeing(prompt_cache_mib=0) as engine:
        monkeypatch.setattr(media_prefill, "encode", counting)
        for question in (ONE, ONE, "Name the colour of the image."):
            await answer_to(engine, asking(question, shown("red")))
        assert len(encoded) == 1
        both = shown("red", "blue")
        await answer_to(engine, asking(MANY, both))
        await answer_to(engine, asking(MANY, Attachments(both.images[::-1])))
        assert len(encoded) == len(set(encoded)) == 2
        await engine.load(LoadRequest("it", str(TINY_VISION)))
        await answer_to(engine, asking(ONE, shown("red")))
        assert encoded.count(encoded[0]) == 2


async def test_guesses_change_nothing() -> None:
    requests = [asking(COUNTING, max_tokens=80), asking(ONE, shown("red"))]
    async with seeing() as plain:
        expected = [(await answer_to(plain, request)).text for request in requests]
    requests = [asking(COUNTING, max_tokens=80, logprobs=None), asking(ONE, shown("red"))]
    async with seeing(prompt_lookup=True) as guessing:
        assert [(await answer_to(guessing, request)).text for request in requests] == expected


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    drawn = Sampling(temperature=1.5, seed=7)
    request = asking(ONE, shown("green"), sampling=drawn)
    async with seeing() as engine:
        alone = await answer_to(engine, request)
        others = [asking(ONE, shown("red")), asking(COUNTING), asking(MANY, shown("blue", "red"))]
        together = await asyncio.gather(*(answer_to(engine, one) for one in [*others, request]))
        assert together[-1].tokens == alone.tokens


async def test_texts_are_scored_and_embedded_as_before_a_picture() -> None:
    score = ScoreRequest("it", "The capital of France is", (" Paris.", " Rome."))
    async with seeing() as engine:
        reader = engine.reader(TextReader)
        before = await engine.score(score)
        vector = (await engine.encode(lambda: reader.read_text("a picture"))).outputs[0]
        await answer_to(engine, asking(ONE, shown("red")))
        assert await engine.score(score) == before
        again = (await engine.encode(lambda: reader.read_text("a picture"))).outputs[0]
        assert again == pytest.approx(vector)


async def test_a_prompt_that_images_make_too_long_is_refused() -> None:
    engine = Engine()
    engine.start()
    try:
        path = str(TINY_VISION)
        await engine.load(LoadRequest("it", path, context_size=40))
        assert (await answer_to(engine, asking(ONE, shown("red")))).text == "The image is red."
        with pytest.raises(InvalidRequest, match="tokens > 39 maximum"):
            await answer_to(engine, asking(MANY, shown("red", "blue", "green", "red")))
    finally:
        await engine.stop(10)


async def test_no_code_in_the_checkpoint_is_run(tmp_path: Path) -> None:
    path = tmp_path / "own"
    shutil.copytree(TINY_VISION, path)
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = json.loads((path / "config.json").read_text()) | {"model_file": "own.py"}
    (path / "config.json").write_text(json.dumps(config))
    assert "brings its own Python code" in await _rejected(model_file=str(path))
    assert not (tmp_path / "ran").exists()


async def test_adapters_are_refused_for_a_vision_model() -> None:
    adapters = (AdapterRequest(str(TINY_VISION), 1.0),)
    sentence = await _rejected(model_file=str(TINY_VISION), adapters=adapters)
    assert "adapter" in sentence


async def test_a_model_without_its_processor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blind"
    shutil.copytree(TINY_VISION, path)
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|image_pad|>", ""))
    sentence = await _rejected(model_file=str(path))
    assert sentence.endswith("to serve its text part alone, set the option type:text")


async def test_a_tower_whose_features_are_not_finite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(TINY_VISION, path)
    held = read_weights(path)
    name = "vision_tower.merger.norm.bias"
    held[name] = mx.full(held[name].shape, float("nan"))
    mx.save_safetensors(str(path / "model.safetensors"), held)
    assert "features are not finite" in await _rejected(model_file=str(path))


async def test_the_encoder_takes_no_more_memory_than_is_charged_for_a_picture_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first large picture costs far more than its share of the small ones before it."""
    path = tmp_path / "sharp"
    shutil.copytree(TINY_VISION, path)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = 1 << 20
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    seen: list[tuple[int, int]] = []  # what was charged, and the peak

    def watched(self: media_prefill.MediaReader, item: MediaItem) -> Features:
        charged = self.needs(MediaPlan(item.tokens, [Span(0, item)]))
        before = mx.get_active_memory()
        features = encode_item(self, item)
        seen.append((charged, mx.get_peak_memory() - before))
        assert features.nbytes <= self.bytes_per_token * len(item.tokens) <= 1.2 * features.nbytes
        return features

    encode_item = media_prefill.MediaReader.encode
    async with seeing(path) as engine:
        monkeypatch.setattr(media_prefill.MediaReader, "encode", watched)
        for size in [(200, 150), (256, 256), (320, 900), (1024, 1024), (640, 640)]:
            picture = encoded(Image.effect_noise(size, 50).convert("RGB"))
            await answer_to(engine, asking(ONE, Attachments((picture,)), max_tokens=1))
    assert len(seen) == 5
    for charged, peak in seen:
        assert 0.95 * peak <= charged <= 2 * peak


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"pixel_values": np.zeros((1, 3, 448, 448))}, 1),
        ({"pixel_values": np.zeros((5, 3, 64, 64))}, 5),
        ({"pixel_values": np.zeros((1, 4, 3, 64, 64))}, 4),
        ({"pixel_values": np.zeros((64, 1536)), "image_grid_thw": np.array([[1, 8, 8]])}, 1),
        ({"pixel_values": np.zeros((192, 1536)), "video_grid_thw": np.array([[3, 8, 8]])}, 3),
        ({"pixel_values": np.zeros((64, 3, 14, 14)), "image_grid_hws": np.array([[8, 8]])}, 1),
        ({"pixel_values": np.zeros((4, 1024, 768))}, 0),
        ({"pixel_values": [np.zeros((3, 14, 280))]}, 0),
        ({"input_features": np.zeros((1, 128, 3000))}, 0),
    ],
)
def test_tiles_and_frames_attend_only_to_themselves(
    arrays: dict[str, np.ndarray], parts: int
) -> None:
    assert parts_of(MediaItem("image", bytes(32), (1,), 0, 1, arrays, 1)) == parts
