"""The models in the files of references: their weights, drawn by name, and the prompt."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

REFERENCES = Path(__file__).with_name("saved_references.json")
PEFT_REFERENCES = REFERENCES.with_name("peft_references.json")
SEEING_REFERENCES = Path(__file__).parent / "vision" / "saved_references.json"
TOKENS = [*range(5, 45)]


def drawn(name: str, shape: Sequence[int]) -> np.ndarray:
    """Weights that depend on the name alone."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    centre = 1.0 if len(shape) == 1 and "norm" in name else 0.0
    return (centre + 0.1 * values).astype(np.float32)


def write_saved(path: Path, reference: Mapping[str, Any]) -> None:
    """Write the checkpoint of a reference."""
    import mlx.core as mx  # which the references are made without

    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(reference["config"]))
    weights = {name: mx.array(drawn(name, shape)) for name, shape in reference["shapes"].items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
