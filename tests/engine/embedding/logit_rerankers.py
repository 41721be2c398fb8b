"""Small rerankers whose score comes from steps of sentence-transformers.

Some answer with a token, in the form that sentence-transformers 5.4 writes, with templates like
those of Qwen3-Reranker, zerank-2 and mxbai-rerank-v2. Another has Dense layers after pooling. Needs
nothing of ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.engine.embedding.tiny_checkpoints import HIDDEN, write

_FIND = "{{ messages | selectattr('role', 'eq', '%s') | map(attribute='content') | first }}"
_QUERY, _DOCUMENT = _FIND % "query", _FIND % "document"
_ASKED = (
    "{% set told = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | list"
    " %}<|im_start|>{{ told[0] if told else 'is it bread?' }}\n"
    f"query: {_QUERY}\ndocument: {_DOCUMENT}<|im_end|>\n<|im_start|><think></think>"
)
_SAID = (
    f"<|im_start|>{_QUERY}<|im_end|>\n<|im_start|>{_DOCUMENT}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content[0].text }}<|im_end|>{% endfor %}"
)
LONG = "river of paris " * 300
_IDENTITY = "torch.nn.modules.linear.Identity"
_PROMPT = {"prompts": {"moon": "is it the moon?"}, "default_prompt_name": "moon"}
# Name → the family of its network, its template, the form of messages, the tokens that it compares,
# and config_sentence_transformers.json.
RERANKERS: dict[str, tuple[str, str, str, tuple[int, int | None], dict[str, Any]]] = {
    "like Qwen3-Reranker": ("qwen3_rerank", _ASKED, "flat", (6, 7), _PROMPT),
    "like zerank-2": ("qwen3_rerank", _SAID, "flat", (9, None), {"activation_fn": _IDENTITY}),
    "like mxbai-rerank-v2": ("qwen2_both_ways", _PARTS, "structured", (12, 11), {}),
}


def write_reranker(name: str, folder: Path) -> Path:
    """Write the checkpoint of a reranker of RERANKERS."""
    family, template, form, (yes, no), stated = RERANKERS[name]
    write(family, folder, is_causal=True)
    (folder / "chat_template.jinja").write_text(template)
    steps = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.{step}"}
        for at, (path, step) in enumerate(zip(("", "1_LogitScore"), steps, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    compared = {"true_token_id": yes, "false_token_id": no}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(compared))
    method = {"method": "forward", "method_output_name": "logits"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": method, "message": {**method, "format": form}},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    stated = {"model_type": "CrossEncoder"} | stated
    (folder / "config_sentence_transformers.json").write_text(json.dumps(stated))
    return folder


def write_pooled_reranker(folder: Path) -> Path:
    """Write the checkpoint of a reranker with Dense layers instead of a head."""
    write("modernbert", folder)
    path, name = "sentence_transformers.base.modules", "sentence_transformers.sentence_transformer"
    modules = [
        {"idx": at, "name": str(at), "path": step, "type": kind}
        for at, (step, kind) in enumerate(
            [
                ("", f"{path}.transformer.Transformer"),
                ("1_Pooling", f"{name}.modules.pooling.Pooling"),
                ("2_Dense", f"{path}.dense.Dense"),
                ("3_LayerNorm", f"{name}.modules.layer_norm.LayerNorm"),
                ("4_Dense", f"{path}.dense.Dense"),
            ]
        )
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    random = np.random.RandomState(3)
    dense = {"in_features": HIDDEN, "out_features": HIDDEN, "bias": False}
    steps: dict[str, dict[str, Any]] = {
        "2_Dense": dense | {"activation_function": "torch.nn.modules.activation.GELU"},
        "3_LayerNorm": {"dimension": HIDDEN},
        "4_Dense": dense
        | {"out_features": 1, "activation_function": _IDENTITY, "module_output_name": "scores"},
    }
    for step, stated in steps.items():
        (folder / step).mkdir()
        (folder / step / "config.json").write_text(json.dumps(stated))
        shapes: dict[str, tuple[int, ...]] = (
            {"linear.weight": (stated["out_features"], HIDDEN)}
            if "Dense" in step
            else {"norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,)}
        )
        weights = {
            key: 0.1 * random.standard_normal(shape).astype(np.float32)
            for key, shape in shapes.items()
        }
        save_file(weights, folder / step / "model.safetensors", {"format": "pt"})
    said = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Tanh"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    return folder
