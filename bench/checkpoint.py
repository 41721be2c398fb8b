"""A checkpoint that two servers run in the same way: float32 weights, and no usable end token."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx

from cli.default_model import cache_directory


def comparable(model: Path) -> Path:
    """Return a copy of the checkpoint for both servers, written to the cache once.

    mlx_lm.server computes in the type of the weights and cannot ignore end tokens, so the copy's
    end token is one that no answer contains.
    """
    copy = cache_directory() / "bench" / model.name
    if copy.is_dir():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
        folder = Path(scratch) / model.name
        shutil.copytree(model, folder)
        for weights in folder.glob("*.safetensors"):
            _cast(weights)
        _without_end(folder)
        folder.replace(copy)
    return copy


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
