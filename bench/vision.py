"""Time to first token for a question about an image, when the image is new and when it is cached.

The model has random weights, and a vision encoder that is as expensive as a small real one;
tokenizer and template are those of the tests' small vision model.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.process import backend, stream
from bench.report import Figure, at_least
from tests.engine.vision.seeing import encoded
from tests.models.tiny_vision_tasks import paint

SIDE = 448  # pixels: 196 image tokens
_TEXT = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024}
_TOWER = {"depth": 8, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6}


def measure(tiny: Path) -> Iterator[Figure]:
    image, other = (encoded(paint(random.Random(seed), "blue", SIDE, SIDE)) for seed in (1, 2))
    with _model(tiny) as model, backend(model, Options=["prompt_cache_mib:256"]) as stub:

        def first(question: str, shown: str) -> float:
            return stream(stub, question, 8, images=[shown]).first

        first("Warm up.", encoded(paint(random.Random(3), "red", SIDE, SIDE)))
        new = first("What colour is the image?", image)
        same = first("What colour is the image?", image)
        yield _ratio("new / seen image, the same question", new, same, 4)
        yield _ratio("new / seen image, another question", new, first("Describe it.", image), 4)
    settings = ["prompt_cache_mib:0"]
    with _model(tiny) as model, backend(model, Options=settings) as stub:
        first("Warm up.", image)
        new = first("What colour is the image?", other)
        same = first("What colour is the image?", other)
        yield _ratio("the same without a prompt cache", new, same, 2)


def _ratio(name: str, new: float, seen: float, goal: float) -> Figure:
    return at_least(name, new / seen, goal, f"{new:.3f} / {seen:.3f} s")


@contextmanager
def _model(tiny: Path) -> Iterator[Path]:
    """A temporary checkpoint of the measured shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for file in tiny.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, path)
        config = json.loads((tiny / "config.json").read_text())
        config["text_config"] |= _TEXT
        config["vision_config"] |= _TOWER | {"out_hidden_size": _TEXT["hidden_size"]}
        (path / "config.json").write_text(json.dumps(config))
        pixels = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
        processor = json.loads((tiny / "preprocessor_config.json").read_text()) | {"size": pixels}
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
        _write_weights(path, config)
        yield path


def _write_weights(path: Path, config: dict[str, Any]) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models import qwen3_vl

    made: Any = qwen3_vl
    settings = made.ModelConfig.from_dict(config)
    settings.text_config = made.TextConfig.from_dict(config["text_config"])
    settings.vision_config = made.VisionConfig.from_dict(config["vision_config"])
    weights: Any = tree_flatten(made.Model(settings).parameters())
    mx.save_safetensors(str(path / "model.safetensors"), dict(weights), {"format": "mlx"})
