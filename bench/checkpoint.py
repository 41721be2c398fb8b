"""Checkpoints for measurements, with the tokenizer of the small trained model or of a given one."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.process import ROOT
from cli.default_model import cache_directory

TINY = ROOT / "tests" / "models" / "tiny_text"
_CONFIG = json.loads((TINY / "config.json").read_text())
TINY_IDS: dict[str, Any] = {name: _CONFIG[name] for name in ("vocab_size", "eos_token_id")}


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """Return a folder in the cache, which `write` fills once."""
    folder = cache_directory() / "bench" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / name
            write(made)
            made.replace(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Copy the small model without its weights to a new folder."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))


def comparable(model: Path) -> Path:
    """Return a copy of a checkpoint that two servers run in the same way.

    mlx_lm.server computes in the type of the weights and cannot ignore end tokens, so the copy has
    float32 weights, and its end token is one that no answer contains.
    """

    def write(folder: Path) -> None:
        shutil.copytree(model, folder)
        for weights in folder.glob("*.safetensors"):
            _cast(weights)
        _without_end(folder)

    return cached(model.name, write)


def _cast(weights: Path) -> None:
    arrays = mx.load(str(weights))
    assert isinstance(arrays, dict)
    cast = {name: array.astype(mx.float32) for name, array in arrays.items()}
    mx.eval(cast)
    mx.save_safetensors(str(weights), cast, metadata={"format": "mlx"})


def _without_end(folder: Path) -> None:
    last = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][-1]
    for name, changed in (
        ("config.json", {"eos_token_id": last["id"], "dtype": "float32", "torch_dtype": "float32"}),
        ("generation_config.json", {"eos_token_id": last["id"]}),
        ("tokenizer_config.json", {"eos_token": last["content"]}),
    ):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}, indent=1))
