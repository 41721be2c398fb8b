"""The small models that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.engine.loading.weights import cast
from backend.engine.speech.speech_builder import open_model
from tests.engine.speech.tiny_speech import write_whisper


def opened(folder: Path) -> Any:
    """A Whisper that computes in float32."""
    model = open_model(folder, "whisper")
    model.dtype = mx.float32
    cast(model, "float32")
    return model


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Whisper of 99 languages."""
    return opened(write_whisper(tmp_path_factory.mktemp("whisper")))


@pytest.fixture(scope="session")
def english(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Whisper of one language."""
    return opened(write_whisper(tmp_path_factory.mktemp("english"), multilingual=False))
