"""`saved_weights`: models that transformers saved compute the logits that PyTorch computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as open_text_model

from backend.engine.loading.weights import mlx_lm_classes
from tests.engine.saved_references import REFERENCES, SEEING_REFERENCES, TOKENS, write_saved

_TEXT_PARTS = (
    *("gemma3", "gemma3 as computed", "kimi_k25", "kimi_k25 as computed", "qwen3_vl_moe"),
    *("minimax_m3_vl", "minimax_m3_vl as computed"),
)
_SEEING = json.loads(SEEING_REFERENCES.read_text())
_REFERENCES = {f"{family} with images": _SEEING[family] for family in _TEXT_PARTS}
_REFERENCES |= json.loads(REFERENCES.read_text())


@pytest.mark.parametrize("family", _REFERENCES)
def test_a_saved_model_computes_the_logits_of_pytorch(family: str, tmp_path: Path) -> None:
    reference: dict[str, Any] = _REFERENCES[family]
    write_saved(tmp_path, reference)
    model, _ = open_text_model(tmp_path, get_model_classes=mlx_lm_classes)
    logits = np.array(model(mx.array([TOKENS]), cache=make_prompt_cache(model))[0, ::8])
    np.testing.assert_allclose(logits, reference["logits"], atol=2e-4)
