"""Small checkpoints of BERT models with rotary positions, as they were published.

Their configurations have the fields of the published ones, and their weights the same names.
`in_form_of_transformers` writes the same model with the fields and names of transformers 5. Needs
NumPy and safetensors, and nothing of ours.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine.embedding.tiny_checkpoints import (
    BERT,
    HEADS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    ROBERTA,
    WIDE,
    Parts,
    Tensors,
    linear,
    norm,
    write_parts,
)

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
RANK, EXPERTS = 4, 4
_CLS = {
    "word_embedding_dimension": HIDDEN,
    "pooling_mode_cls_token": True,
    "pooling_mode_mean_tokens": False,
}
_MEAN = {
    "word_embedding_dimension": HIDDEN,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
}


def write(family: str, folder: Path, **changes: Any) -> Path:
    """Write the checkpoint of a family of FAMILIES; `changes` go into its config.json."""
    write_parts(folder, FAMILIES[family], changes)
    if family == "jina_v3":
        steps = json.loads((folder / "modules.json").read_text())
        steps[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
        (folder / "modules.json").write_text(json.dumps(steps))
    return folder


def _adapted(name: str, rows: int, columns: int) -> Tensors:
    """A matrix with the adapters of all tasks; those of embeddings have their factors swapped."""
    first, second = (RANK, columns), (rows, RANK)
    if name.endswith("_embeddings"):
        first, second = second, first
    yield f"{name}.parametrizations.weight.original", (rows, columns)
    yield f"{name}.parametrizations.weight.0.lora_A", (len(TASKS), *first)
    yield f"{name}.parametrizations.weight.0.lora_B", (len(TASKS), *second)


def _jina_v3(vocabulary: int) -> Tensors:
    yield from _adapted("roberta.embeddings.word_embeddings", vocabulary, HIDDEN)
    yield from _adapted("roberta.embeddings.token_type_embeddings", 1, HIDDEN)
    yield from norm("roberta.emb_ln")
    for layer in range(LAYERS):
        here = f"roberta.encoder.layers.{layer}"
        for name, rows, columns in (
            ("mixer.Wqkv", 3 * HIDDEN, HIDDEN),
            ("mixer.out_proj", HIDDEN, HIDDEN),
            ("mlp.fc1", WIDE, HIDDEN),
            ("mlp.fc2", HIDDEN, WIDE),
        ):
            yield from _adapted(f"{here}.{name}", rows, columns)
            yield f"{here}.{name}.bias", (rows,)
        yield from norm(f"{here}.norm1")
        yield from norm(f"{here}.norm2")
    yield from _adapted("roberta.pooler.dense", HIDDEN, HIDDEN)
    yield "roberta.pooler.dense.bias", (HIDDEN,)


def _jina_pairs(vocabulary: int) -> Tensors:
    yield "roberta.embeddings.word_embeddings.weight", (vocabulary, HIDDEN)
    yield "roberta.embeddings.position_embeddings.weight", (POSITIONS + 2, HIDDEN)
    yield "roberta.embeddings.token_type_embeddings.weight", (1, HIDDEN)
    yield from norm("roberta.emb_ln")
    for layer in range(LAYERS):
        here = f"roberta.encoder.layers.{layer}"
        yield from linear(f"{here}.mixer.Wqkv", 3 * HIDDEN, HIDDEN)
        yield from linear(f"{here}.mixer.out_proj", HIDDEN, HIDDEN)
        yield from norm(f"{here}.norm1")
        yield from linear(f"{here}.mlp.fc1", WIDE, HIDDEN)
        yield from linear(f"{here}.mlp.fc2", HIDDEN, WIDE)
        yield from norm(f"{here}.norm2")
    yield from linear("classifier.dense", HIDDEN, HIDDEN)
    yield from linear("classifier.out_proj", 1, HIDDEN)


def _nomic(vocabulary: int) -> Tensors:
    yield "embeddings.word_embeddings.weight", (vocabulary, HIDDEN)
    yield "embeddings.token_type_embeddings.weight", (2, HIDDEN)
    yield from norm("emb_ln")
    for layer in range(LAYERS):
        here = f"encoder.layers.{layer}"
        yield f"{here}.attn.Wqkv.weight", (3 * HIDDEN, HIDDEN)
        yield f"{here}.attn.out_proj.weight", (HIDDEN, HIDDEN)
        yield from norm(f"{here}.norm1")
        yield f"{here}.mlp.fc11.weight", (WIDE, HIDDEN)
        yield f"{here}.mlp.fc12.weight", (WIDE, HIDDEN)
        yield f"{here}.mlp.fc2.weight", (HIDDEN, WIDE)
        yield from norm(f"{here}.norm2")


def _nomic_pairs(vocabulary: int) -> Tensors:
    for name, shape in _nomic(vocabulary):
        yield f"bert.{name}", shape
    yield from linear("bert.pooler.dense", HIDDEN, HIDDEN)
    yield from linear("classifier", 1, HIDDEN)


def _nomic_moe(vocabulary: int) -> Tensors:
    yield "embeddings.word_embeddings.weight", (vocabulary, HIDDEN)
    yield "embeddings.token_type_embeddings.weight", (1, HIDDEN)
    yield from norm("emb_ln")
    for layer in range(2 * LAYERS):
        here = f"encoder.layers.{layer}"
        yield from linear(f"{here}.attn.Wqkv", 3 * HIDDEN, HIDDEN)
        yield from linear(f"{here}.attn.out_proj", HIDDEN, HIDDEN)
        yield from norm(f"{here}.norm1")
        if layer % 2 == 1:
            yield f"{here}.mlp.router.layer.weight", (EXPERTS, HIDDEN)
            yield f"{here}.mlp.experts.mlp.w1", (EXPERTS * WIDE, HIDDEN)
            yield f"{here}.mlp.experts.mlp.w2", (EXPERTS * WIDE, HIDDEN)
            yield f"{here}.mlp.experts.bias", (HIDDEN,)
        else:
            yield from linear(f"{here}.mlp.fc1", WIDE, HIDDEN)
            yield from linear(f"{here}.mlp.fc2", HIDDEN, WIDE)
        yield from norm(f"{here}.norm2")


def _gte(prefix: str, segments: int, vocabulary: int) -> Tensors:
    yield f"{prefix}embeddings.word_embeddings.weight", (vocabulary, HIDDEN)
    if segments:
        yield f"{prefix}embeddings.token_type_embeddings.weight", (segments, HIDDEN)
    yield from norm(f"{prefix}embeddings.LayerNorm")
    for layer in range(LAYERS):
        here = f"{prefix}encoder.layer.{layer}"
        yield from linear(f"{here}.attention.qkv_proj", 3 * HIDDEN, HIDDEN)
        yield from linear(f"{here}.attention.o_proj", HIDDEN, HIDDEN)
        yield from norm(f"{here}.attn_ln")
        yield f"{here}.mlp.up_gate_proj.weight", (2 * WIDE, HIDDEN)
        yield from linear(f"{here}.mlp.down_proj", HIDDEN, WIDE)
        yield from norm(f"{here}.mlp_ln")


def _gte_multilingual(vocabulary: int) -> Tensors:
    """The weights include the head for sparse vectors, as the published ones do."""
    yield from _gte("new.", 1, vocabulary)
    yield from linear("classifier", 1, HIDDEN)


def _gte_english(vocabulary: int) -> Tensors:
    return _gte("new.", 0, vocabulary)


def _snowflake(vocabulary: int) -> Tensors:
    return _gte("", 1, vocabulary)


def _gte_pairs(vocabulary: int) -> Tensors:
    yield from _gte("new.", 1, vocabulary)
    yield from linear("new.pooler.dense", HIDDEN, HIDDEN)
    yield from linear("classifier", 1, HIDDEN)


_JINA_CODE = "jinaai/xlm-roberta-flash-implementation--"
_JINA = {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "auto_map": {
        "AutoConfig": f"{_JINA_CODE}configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": f"{_JINA_CODE}modeling_lora.XLMRobertaLoRA",
    },
    "bos_token_id": 0,
    "emb_pooler": None,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": POSITIONS + 2,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
    "type_vocab_size": 1,
    "use_cache": False,
    "use_flash_attn": True,
}
_JINA_V3 = _JINA | {
    "load_trained_adapters": True,
    "lora_adaptations": list(TASKS),
    "lora_alpha": 1,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": RANK,
    "matryoshka_dimensions": [8, 16, 32],
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": dict.fromkeys(TASKS, ""),
    "truncate_dim": None,
    "use_reg_tokens": False,
}
_ONE_SCORE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_JINA_RERANKER = (
    _JINA
    | _ONE_SCORE
    | {
        "architectures": ["XLMRobertaForSequenceClassification"],
        "auto_map": {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"},
        "num_labels": 1,
    }
)
_NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig"
    },
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": POSITIONS // 2,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_inner": WIDE,
    "n_layer": LAYERS,
    "n_positions": POSITIONS,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
}
_NOMIC_RERANKER = _NOMIC | _ONE_SCORE | {"architectures": ["NomicBertForSequenceClassification"]}
_NOMIC_MOE = _NOMIC | {
    "activation_function": "gelu",
    "add_pooling_layer": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-05,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "n_layer": 2 * LAYERS,
    "num_experts": EXPERTS,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000.0,
    "type_vocab_size": 1,
}
_GTE = {
    "model_type": "new",
    "architectures": ["NewModel"],
    "auto_map": {"AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig"},
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}
_GTE_ENGLISH = _GTE | {
    "pad_token_id": 0,
    "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500000,
    "type_vocab_size": 0,
}
_SNOWFLAKE = _GTE | {
    "model_type": "gte",
    "architectures": ["GteModel"],
    "auto_map": {"AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig"},
    "rope_scaling": None,
    "rope_theta": 160000,
}
_GTE_RERANKER = _GTE | _ONE_SCORE | {"architectures": ["NewForSequenceClassification"]}

FAMILIES: dict[str, Parts] = {
    "jina_v3": (ROBERTA, _JINA_V3, _jina_v3, {"Pooling": _MEAN, "Normalize": {}}),
    "nomic_v15": (BERT, _NOMIC, _nomic, {"Pooling": _MEAN}),
    "nomic_v2_moe": (ROBERTA, _NOMIC_MOE, _nomic_moe, {"Pooling": _MEAN, "Normalize": {}}),
    "gte_multilingual": (ROBERTA, _GTE, _gte_multilingual, {"Pooling": _CLS, "Normalize": {}}),
    "gte_english": (BERT, _GTE_ENGLISH, _gte_english, {"Pooling": _CLS}),
    "snowflake_v2": (ROBERTA, _SNOWFLAKE, _snowflake, {"Pooling": _CLS, "Normalize": {}}),
    "jina_reranker": (ROBERTA, _JINA_RERANKER, _jina_pairs, {}),
    "nomic_reranker": (BERT, _NOMIC_RERANKER, _nomic_pairs, {}),
    "gte_reranker": (ROBERTA, _GTE_RERANKER, _gte_pairs, {}),
}
EMBEDDERS = tuple(family for family in FAMILIES if "reranker" not in family)
RERANKERS = tuple(family for family in FAMILIES if "reranker" in family)
# transformers has no class for the others.
OF_TRANSFORMERS = tuple(
    family for family in FAMILIES if family not in ("nomic_v2_moe", "jina_reranker")
)


def in_form_of_transformers(published: Path, folder: Path, *, weights: bool = True) -> Path:
    """The same model in the form of transformers 5.

    weights: whether their names change too. transformers 5.23 saves the configuration and adapters
    of this form, with the published names of the weights.
    """
    shutil.copytree(published, folder)
    config = json.loads((published / "config.json").read_text())
    found = load_file(published / "model.safetensors")
    if "lora_adaptations" in config:
        _write_adapters(found, folder)
        found = {
            name.replace(".parametrizations.weight.original", ".weight"): value
            for name, value in found.items()
            if "lora_" not in name
        }
        steps = json.loads((folder / "modules.json").read_text())
        steps[0] = {**steps[0], "type": "sentence_transformers.models.Transformer"}
        steps[0].pop("kwargs")
        (folder / "modules.json").write_text(json.dumps(steps))
    if weights:
        found = _renamed(found)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_later_config(config)))
    return folder


def _later_config(config: dict[str, Any]) -> dict[str, Any]:
    theta = float(config.get("rotary_emb_base") or config["rope_theta"])
    rope: dict[str, Any] = {}
    scaling = config.get("rope_scaling")
    if scaling:
        size = config["hidden_size"] // config["num_attention_heads"]
        theta *= scaling["factor"]
        rope = {"rope_type": "linear", "factor": scaling["factor"] ** (2 / size)}
    names = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    kept = (*_KEPT, *names.values())
    found = {names.get(name, name): value for name, value in config.items()}
    model_type, name = {
        "xlm-roberta": ("jina_embeddings_v3", "JinaEmbeddingsV3"),
        "nomic_bert": ("nomic_bert", "NomicBert"),
    }.get(config["model_type"], ("gte", "Gte"))
    task = "ForSequenceClassification" if "id2label" in config else "Model"
    return {name: found[name] for name in kept if found.get(name) is not None} | {
        "model_type": model_type,
        "architectures": [f"{name}{task}"],
        "hidden_act": "silu" if model_type == "nomic_bert" else "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **rope},
    }


_KEPT = (
    *("vocab_size", "type_vocab_size", "pad_token_id", "id2label", "label2id"),
    *("lora_adaptations", "lora_alpha", "lora_rank"),
)
_LATER_NAMES = (
    ("new.encoder.layer.", "gte.layers."),
    ("new.", "gte."),
    ("bert.", "nomic_bert."),
    ("roberta.", ""),
    ("encoder.layers.", "layers."),
    ("encoder.layer.", "layers."),
    ("emb_ln.", "embeddings.LayerNorm."),
    ("mixer.out_proj.", "self_attn.o_proj."),
    ("attn.out_proj.", "self_attn.o_proj."),
    ("attention.o_proj.", "self_attn.o_proj."),
    ("attn_ln.", "post_attention_layernorm."),
    ("norm1.", "post_attention_layernorm."),
    ("mlp_ln.", "post_mlp_layernorm."),
    ("norm2.", "post_mlp_layernorm."),
    ("mlp.fc11.", "mlp.up_proj."),
    ("mlp.fc12.", "mlp.gate_proj."),
)
_DIVIDED = {
    "mixer.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
}


def _renamed(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as transformers 5 names and divides them in memory."""
    found: dict[str, np.ndarray] = {}
    pairs = "classifier.weight" in weights and any("pooler" in name for name in weights)
    for full, value in weights.items():
        name = full
        if full.startswith("classifier.") and not pairs:
            continue
        for before, after in _LATER_NAMES:
            name = name.replace(before, after)
        if not pairs:
            name = name.removeprefix("gte.")
        for whole, parts in _DIVIDED.items():
            if whole in name:
                divided = np.split(value, len(parts))
                found |= {
                    name.replace(whole, part): piece.copy()
                    for part, piece in zip(parts, divided, strict=True)
                }
                break
        else:
            found[name] = value
    if "layers.0.mlp.gate_proj.weight" in found:
        found = {name.replace("mlp.fc2.", "mlp.down_proj."): value for name, value in found.items()}
    return found


def _write_adapters(weights: dict[str, np.ndarray], folder: Path) -> None:
    """Each task's adapter as PEFT writes it."""
    mark = ".parametrizations.weight.0.lora_A"
    modules = [name.removesuffix(mark) for name in weights if name.endswith(mark)]
    for place, task in enumerate(TASKS):
        found: dict[str, np.ndarray] = {}
        for module in modules:
            first = weights[f"{module}.parametrizations.weight.0.lora_A"][place]
            second = weights[f"{module}.parametrizations.weight.0.lora_B"][place]
            if module.endswith("_embeddings"):
                name = "base_model.model." + module.removeprefix("roberta.")
                found[f"{name}.lora_embedding_A"] = np.ascontiguousarray(first.T)
                found[f"{name}.lora_embedding_B"] = np.ascontiguousarray(second.T)
                continue
            for name, piece in _renamed({f"{module}.": second}).items():
                stem = "base_model.model." + name.removesuffix(".")
                found[f"{stem}.lora_A.weight"] = first.copy()
                found[f"{stem}.lora_B.weight"] = piece
        own = folder / task.replace(".", "_").replace("-", "_")
        own.mkdir()
        save_file(found, own / "adapter_model.safetensors", {"format": "pt"})
        stated = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": 1,
            "bias": "none",
            "use_dora": False,
            "modules_to_save": None,
            "target_modules": sorted({name.split(".lora_")[0].split(".")[-1] for name in found}),
        }
        (own / "adapter_config.json").write_text(json.dumps(stated))
