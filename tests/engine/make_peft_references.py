"""Writes small models, adapters that PEFT makes for them, and the logits that PyTorch computes.

Run where transformers, torch and peft are installed; the project itself does not need them:

    python -m tests.engine.make_peft_references
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.make_saved_references import _EXPERTS, _SIZES
from tests.engine.saved_references import PEFT_REFERENCES, TOKENS, drawn

_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 64}
_ONE = {"num_hidden_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    # mlx-lm rounds the root of Gemma's width.
    "gemma2": _SIZES | {"hidden_size": 64, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": _GPT2,
    "gpt_oss": _SIZES | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mixtral": _SIZES | _ONE | _EXPERTS | {"sliding_window": None},
    "qwen3": _SIZES | _ONE | {"head_dim": 8},
    "qwen3_moe": _SIZES | _ONE | _EXPERTS | {"num_experts": 4, "head_dim": 16},
}  # fmt: skip
_QUERIES: dict[str, Any] = {"target_modules": ["q_proj"]}
_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a bias": ("qwen3", _QUERIES | {"lora_bias": True}),
    "tokens": ("qwen3", _QUERIES | {"trainable_token_indices": [5, 9, 17]}),
    "tokens of a tied head": ("gemma2", _QUERIES | {"trainable_token_indices": [5, 9]}),
    "tokens of each table": (
        "qwen3",
        _QUERIES | {"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [7]}},
    ),
    "all experts": ("qwen3_moe", _QUERIES | {"target_parameters": _PARAMETERS}),
    "all experts of Mixtral": ("mixtral", _QUERIES | {"target_parameters": _PARAMETERS}),
    "all experts of gpt-oss": ("gpt_oss", _QUERIES | {"target_parameters": _PARAMETERS}),
    "one matrix of all experts": (
        "qwen3_moe",
        _QUERIES | {"target_parameters": _PARAMETERS[1:], "rank_pattern": {"experts.down_proj": 2},
                    "alpha_pattern": {"experts.down_proj": 12}},
    ),
    "a router": ("qwen3_moe", _QUERIES | {"target_parameters": ["mlp.gate.weight"]}),
    "DoRA of an embedding": ("qwen3", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "an embedding of a tied head": ("gemma2", {"target_modules": ["embed_tokens"]}),
    "a tied head": ("gemma2", {"target_modules": ["q_proj", "lm_head"]}),
    "a copy of a tied head": ("gemma2", _QUERIES | {"modules_to_save": ["lm_head"]}),
    "a copy of an embedding": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["wte"]},
    ),
    "copies of both": ("gemma2", _QUERIES | {"modules_to_save": ["embed_tokens", "lm_head"]}),
}  # fmt: skip


def _write(file: Path, kept: Any = lambda _: True) -> dict[str, list[int]]:
    """Draw the tensors of a file again; return their shapes."""
    shapes = {name: list(each.shape) for name, each in load_file(file).items() if kept(name)}
    weights = {name: drawn(name, shape) for name, shape in sorted(shapes.items())}
    save_file(weights, file, metadata={"format": "pt"})
    return shapes


def reference(family: str, stated: dict[str, Any]) -> dict[str, Any]:
    import peft  # type: ignore[import-not-found]
    import torch  # type: ignore[import-not-found]
    import transformers

    config = transformers.AutoConfig.for_model(family, **MODELS[family])
    with tempfile.TemporaryDirectory() as name:
        base, adapter = Path(name) / "base", Path(name) / "adapter"
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
        shapes = _write(base / "model.safetensors")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        made = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **stated)
        peft.get_peft_model(model, made).save_pretrained(adapter)
        file = adapter / "adapter_model.safetensors"
        tensors = _write(file, lambda tensor: not tensor.endswith(".base_layer.weight"))
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with torch.no_grad():
            adapted = peft.PeftModel.from_pretrained(model, adapter).eval()
            logits = adapted(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, ::8]
        found = [
            json.loads((path).read_text())
            for path in (base / "config.json", adapter / "adapter_config.json")
        ]
    return {
        "config": found[0],
        "shapes": shapes,
        "adapter": {key: value for key, value in found[1].items() if value not in (None, {})}
        | {"base_model_name_or_path": None},
        "tensors": tensors,
        "logits": np.round(logits.numpy().astype(float), 5).tolist(),
    }


if __name__ == "__main__":
    references = {name: reference(*case) for name, case in CASES.items()}
    PEFT_REFERENCES.write_text(json.dumps(references, separators=(",", ":")))
