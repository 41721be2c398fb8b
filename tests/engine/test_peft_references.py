"""Adapters in PEFT's format compute the logits that PEFT computes with PyTorch."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.load_request import AdapterRequest, LoadRequest
from backend.engine.loading.loader import load
from tests.engine.folder_changes import put
from tests.engine.loading_models import write_tokenizer
from tests.engine.loads import at_once
from tests.engine.saved_references import PEFT_REFERENCES, TOKENS, drawn, write_saved

_REFERENCES = json.loads(PEFT_REFERENCES.read_text())


@pytest.mark.parametrize("case", _REFERENCES)
def test_an_adapter_computes_the_logits_of_peft(case: str, tmp_path: Path) -> None:
    reference: dict[str, Any] = _REFERENCES[case]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_saved(base, reference)
    write_tokenizer(base)
    put("adapter_config.json", reference["adapter"])(adapter)
    tensors = {name: mx.array(drawn(name, shape)) for name, shape in reference["tensors"].items()}
    mx.save_safetensors(str(adapter / "adapter_model.safetensors"), tensors)
    request = LoadRequest(
        "it",
        str(base),
        settings={"load_trial": False},
        adapters=(AdapterRequest(str(adapter)),),
    )
    engine, _, _ = at_once(load(request, 1, threading.Event()))
    assert engine is not None
    logits = engine.model(mx.array([TOKENS]), cache=make_prompt_cache(engine.model))[0, ::8]
    np.testing.assert_allclose(np.array(logits), reference["logits"], atol=2e-4)
