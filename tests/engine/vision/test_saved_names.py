"""`saved_names`: models that transformers saved compute the logits that PyTorch computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.engine.caching import kv
from backend.engine.vision.vision_builder import _open_multimodal_model
from tests.engine.saved_references import SEEING_REFERENCES, TOKENS, write_saved

_REFERENCES = json.loads(SEEING_REFERENCES.read_text())


@pytest.mark.parametrize("family", _REFERENCES)
def test_a_saved_model_computes_the_logits_of_pytorch(family: str, tmp_path: Path) -> None:
    reference: dict[str, Any] = _REFERENCES[family]
    write_saved(tmp_path, reference)
    model, _ = _open_multimodal_model(tmp_path)
    logits = np.array(model(mx.array([TOKENS]), cache=kv.new_row(model))[0, ::8])
    np.testing.assert_allclose(logits, reference["logits"], atol=2e-4)
