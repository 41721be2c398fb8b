"""A small jina-embeddings-v4 with random weights, in the form of the published one.

Its code holds adapters of several tasks in each layer, which PEFT saves with the task's name. Needs
NumPy and safetensors, and nothing of ours.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.embedding.tiny_checkpoints import (
    HEADS,
    HIDDEN,
    LAYERS,
    QWEN,
    WIDE,
    Tensors,
    linear,
    write_parts,
)

TASKS = ("retrieval", "text-matching", "code")
RANK, ALPHA = 4, 8
_KEPT = HIDDEN // 2
_ADAPTED = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_KEPT, HIDDEN),
    "self_attn.v_proj": (_KEPT, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}


def write(folder: Path, **changes: Any) -> Path:
    """Write the checkpoint; `changes` go into its config.json."""
    write_parts(folder, (QWEN, _CONFIG, _tensors, {}), changes, appends=False)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    steps = [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "adapters").mkdir()
    rng = np.random.RandomState(4)
    save_file(dict(_adapters(rng)), folder / "adapters" / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def merged_text_model(published: Path, task: str, folder: Path) -> Path:
    """Write the language model with a task's adapter added, for Qwen2_5_VLTextModel."""
    shutil.copytree(published, folder)
    adapters = load_file(published / "adapters" / "adapter_model.safetensors")
    found = {}
    for full, value in load_file(published / "model.safetensors").items():
        if not full.startswith("model."):
            continue
        module = f"base_model.model.{full.removesuffix('.weight')}"
        if (first := f"{module}.lora_A.{task}.weight") in adapters:
            second = adapters[f"{module}.lora_B.{task}.weight"]
            value = value + second @ adapters[first] * (ALPHA / RANK)
        found[full.removeprefix("model.language_model.")] = value
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((published / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _tensors(vocabulary: int) -> Tensors:
    yield "model.language_model.embed_tokens.weight", (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        here = f"model.language_model.layers.{layer}"
        for name, (rows, columns) in _ADAPTED.items():
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                yield from linear(f"{here}.{name}", rows, columns)
            else:
                yield f"{here}.{name}.weight", (rows, columns)
        yield f"{here}.input_layernorm.weight", (HIDDEN,)
        yield f"{here}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.language_model.norm.weight", (HIDDEN,)
    yield from linear("model.visual.merger.mlp.0", HIDDEN, HIDDEN)
    yield "lm_head.weight", (vocabulary, HIDDEN)
    yield from linear("multi_vector_projector", 8, HIDDEN)


def _adapters(rng: np.random.RandomState) -> Iterator[tuple[str, np.ndarray]]:
    places = [f"model.language_model.layers.{layer}" for layer in range(LAYERS)]
    modules = {f"{place}.{name}": shape for place in places for name, shape in _ADAPTED.items()}
    modules["multi_vector_projector"] = (8, HIDDEN)
    modules["model.visual.merger.mlp.0"] = (HIDDEN, HIDDEN)
    for module, (rows, columns) in modules.items():
        for task in TASKS:
            for mark, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                name = f"base_model.model.{module}.lora_{mark}.{task}.weight"
                yield name, (rng.standard_normal(shape) * 0.2).astype(np.float32)


_TEXT = {
    "model_type": "qwen2_5_vl_text",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "max_position_embeddings": 128000,
    "max_window_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS // 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
_CONFIG = {
    "model_type": "qwen2_5_vl",
    "architectures": ["JinaEmbeddingsV4Model"],
    "auto_map": {"AutoModel": "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model"},
    "hidden_size": HIDDEN,
    "matryoshka_dims": [8, 16, 32],
    "multi_vector_projector_dim": 8,
    "single_vector_pool_strategy": "mean",
    "task_names": list(TASKS),
    "text_config": _TEXT,
    "tie_word_embeddings": True,
    "truncate_dim": None,
    "vision_config": {"depth": 1, "hidden_size": HIDDEN},
}
