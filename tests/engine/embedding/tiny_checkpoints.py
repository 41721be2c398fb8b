"""Small checkpoints with random weights, in the formats of published ones.

The weights come from a seed, so that a reference implementation elsewhere reads the very same
checkpoint (`make_references`). Needs NumPy, safetensors and tokenizers, and nothing of ours.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

HIDDEN, HEADS, WIDE, LAYERS, POSITIONS = 32, 4, 48, 2, 128
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
PRIVACY_LABELS = ("O", *(f"{mark}-{group}" for group in ("secret", "email") for mark in "BIES"))
_WORDS = ("yes", "no", "the", "of", "is", "paris", "france", "river", "moon", "bread")

Tensors = Iterator[tuple[str, tuple[int, ...]]]


class Specials:
    """The special tokens of a family; their ids are their positions in `tokens`."""

    def __init__(
        self, *tokens: str, start: str, between: str, end: str, pad: str, unk: str
    ) -> None:
        self.tokens = tokens
        self.start, self.between, self.end, self.pad, self.unk = start, between, end, pad, unk


BERT = Specials(
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    start="[CLS]",
    between="[SEP]",
    end="[SEP]",
    pad="[PAD]",
    unk="[UNK]",
)
ROBERTA = Specials(
    *("<s>", "<pad>", "</s>", "<unk>"),
    start="<s>",
    between="</s> </s>",
    end="</s>",
    pad="<pad>",
    unk="<unk>",
)
QWEN = Specials(
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<unk>"),
    start="",
    between="",
    end="<|endoftext|>",
    pad="<|endoftext|>",
    unk="<unk>",
)
_GEMMA = Specials(
    *("<pad>", "<eos>", "<bos>", "<unk>"),
    start="<bos>",
    between="",
    end="<eos>",
    pad="<pad>",
    unk="<unk>",
)


Weights = Callable[[int], Tensors]  # for a size of the vocabulary
# The special tokens, the configuration, the weights' shapes, and the steps of modules.json.
Parts = tuple[Specials, dict[str, Any], Weights, dict[str, Any]]


def write(family: str, folder: Path, **changes: Any) -> Path:
    """Write the checkpoint of a family of FAMILIES; `changes` go into its config.json."""
    appends = family not in ("qwen3_rerank", "privacy_labels")
    return write_parts(folder, FAMILIES[family], changes, appends=appends)


def write_parts(
    folder: Path, parts: Parts, changes: Mapping[str, Any], *, appends: bool = True
) -> Path:
    """Write a checkpoint. appends: whether its tokenizer adds special tokens."""
    specials, config, tensors, modules = parts
    vocabulary = write_tokenizer(folder, specials, appends=appends)
    config = {**config, "vocab_size": vocabulary, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.RandomState(20)
    weights = {name: _random(rng, name, shape) for name, shape in tensors(vocabulary)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if modules:
        _modules(folder, rng, modules)
    return folder


def _random(rng: np.random.RandomState, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1)
    if name.endswith(("norm.weight", "Norm.weight", "_ln.weight", "norm1.weight", "norm2.weight")):
        values += 1
    return values.astype(np.float32)


def write_tokenizer(folder: Path, specials: Specials, *, appends: bool) -> int:
    """A WordPiece tokenizer of a few words and all ASCII characters; returns its size."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [*specials.tokens, *_WORDS, *string.ascii_lowercase, *string.digits]
    pieces += [f"##{letter}" for letter in string.ascii_lowercase + string.digits]
    pieces += [*string.punctuation]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=specials.unk))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(specials.tokens))
    if appends:
        around = [part for part in (specials.start, "$A", specials.end) if part]
        pair = [part for part in (specials.start, "$A") if part]
        pair += [*specials.between.split(), "$B:1", f"{specials.end}:1"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(around),
            pair=" ".join(pair),
            special_tokens=[(token, vocabulary[token]) for token in specials.tokens],
        )
    # real checkpoints have such leftover settings, which no implementation reads
    tokenizer.enable_truncation(16)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"cls_token": specials.start, "sep_token": specials.end}
    if not specials.start or specials is _GEMMA:
        named = {"eos_token": specials.end}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": POSITIONS if specials in (BERT, ROBERTA) else 512,
        "pad_token": specials.pad,
        "unk_token": specials.unk,
        "model_input_names": ["input_ids", "attention_mask"]
        + (["token_type_ids"] if specials is BERT else []),
        **named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(pieces)


def _modules(folder: Path, rng: np.random.RandomState, modules: Mapping[str, Any]) -> None:
    """modules.json of sentence-transformers, and a folder for each of its steps."""
    steps = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for place, (kind, settings) in enumerate(modules.items(), 1):
        name = kind.rstrip("0123456789")
        path = f"{place}_{name}"
        steps.append(
            {
                "idx": place,
                "name": str(place),
                "path": path,
                "type": f"sentence_transformers.models.{name}",
            }
        )
        (folder / path).mkdir(exist_ok=True)
        if name != "Normalize":
            (folder / path / "config.json").write_text(json.dumps(settings))
        if name == "Dense":
            shape = (settings["out_features"], settings["in_features"])
            weights = {"linear.weight": _random(rng, "linear", shape)}
            save_file(weights, folder / path / "model.safetensors", {"format": "pt"})
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS}))


def linear(name: str, rows: int, columns: int) -> Tensors:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def norm(name: str) -> Tensors:
    yield f"{name}.weight", (HIDDEN,)
    yield f"{name}.bias", (HIDDEN,)


def _bert(prefix: str, positions: int, types: int, vocabulary: int) -> Tensors:
    yield f"{prefix}embeddings.word_embeddings.weight", (vocabulary, HIDDEN)
    yield f"{prefix}embeddings.position_embeddings.weight", (positions, HIDDEN)
    yield f"{prefix}embeddings.token_type_embeddings.weight", (types, HIDDEN)
    yield from norm(f"{prefix}embeddings.LayerNorm")
    for layer in range(LAYERS):
        here = f"{prefix}encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            yield from linear(f"{here}.attention.self.{part}", HIDDEN, HIDDEN)
        yield from linear(f"{here}.attention.output.dense", HIDDEN, HIDDEN)
        yield from norm(f"{here}.attention.output.LayerNorm")
        yield from linear(f"{here}.intermediate.dense", WIDE, HIDDEN)
        yield from linear(f"{here}.output.dense", HIDDEN, WIDE)
        yield from norm(f"{here}.output.LayerNorm")


def _with(body: Weights, *more: tuple[str, tuple[int, ...]], outer: str = "") -> Weights:
    """The body's tensors, those for pre-training left out, and more. outer: before their names."""

    def tensors(vocabulary: int) -> Tensors:
        for name, shape in body(vocabulary):
            if not name.startswith(("pooler.", "vocab_")):
                yield outer + name, shape
        yield from more

    return tensors


def _modernbert(prefix: str, vocabulary: int) -> Tensors:
    yield f"{prefix}embeddings.tok_embeddings.weight", (vocabulary, HIDDEN)
    yield f"{prefix}embeddings.norm.weight", (HIDDEN,)
    for layer in range(LAYERS + 1):
        here = f"{prefix}layers.{layer}"
        if layer:
            yield f"{here}.attn_norm.weight", (HIDDEN,)
        yield f"{here}.attn.Wqkv.weight", (3 * HIDDEN, HIDDEN)
        yield f"{here}.attn.Wo.weight", (HIDDEN, HIDDEN)
        yield f"{here}.mlp_norm.weight", (HIDDEN,)
        yield f"{here}.mlp.Wi.weight", (2 * WIDE, HIDDEN)
        yield f"{here}.mlp.Wo.weight", (HIDDEN, WIDE)
    yield f"{prefix}final_norm.weight", (HIDDEN,)


def _decoder(
    prefix: str,
    layers: int,
    norms: tuple[str, ...],
    vocabulary: int,
    *,
    head_norms: bool = True,
    biases: bool = False,
) -> Tensors:
    """head_norms: of queries and keys, as in Qwen3. biases: of queries, keys and values."""
    yield f"{prefix}embed_tokens.weight", (vocabulary, HIDDEN)
    for layer in range(layers):
        here = f"{prefix}layers.{layer}"
        yield f"{here}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{here}.self_attn.k_proj.weight", (HIDDEN // 2, HIDDEN)
        yield f"{here}.self_attn.v_proj.weight", (HIDDEN // 2, HIDDEN)
        yield f"{here}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        if head_norms:
            yield f"{here}.self_attn.q_norm.weight", (HIDDEN // HEADS,)
            yield f"{here}.self_attn.k_norm.weight", (HIDDEN // HEADS,)
        if biases:
            yield f"{here}.self_attn.q_proj.bias", (HIDDEN,)
            yield f"{here}.self_attn.k_proj.bias", (HIDDEN // 2,)
            yield f"{here}.self_attn.v_proj.bias", (HIDDEN // 2,)
        yield f"{here}.mlp.gate_proj.weight", (WIDE, HIDDEN)
        yield f"{here}.mlp.up_proj.weight", (WIDE, HIDDEN)
        yield f"{here}.mlp.down_proj.weight", (HIDDEN, WIDE)
        for norm in ("input_layernorm", "post_attention_layernorm", *norms):
            yield f"{here}.{norm}.weight", (HIDDEN,)
    yield f"{prefix}norm.weight", (HIDDEN,)


def _qwen3_5(prefix: str, vocabulary: int) -> Tensors:
    """Three layers of linear attention, and one of full attention with gates."""
    for name, shape in _decoder(prefix, 4, (), vocabulary):
        if ".3." in name or "self_attn" not in name:
            yield name, (2 * HIDDEN, HIDDEN) if "q_proj" in name else shape
    for layer in range(3):
        here = f"{prefix}layers.{layer}.linear_attn"
        yield f"{here}.A_log", (HEADS,)
        yield f"{here}.dt_bias", (HEADS,)
        yield f"{here}.conv1d.weight", (2 * HIDDEN, 1, 4)
        yield f"{here}.in_proj_qkv.weight", (2 * HIDDEN, HIDDEN)
        yield f"{here}.in_proj_z.weight", (HIDDEN, HIDDEN)
        yield f"{here}.in_proj_a.weight", (HEADS, HIDDEN)
        yield f"{here}.in_proj_b.weight", (HEADS, HIDDEN)
        yield f"{here}.norm.weight", (HIDDEN // HEADS,)
        yield f"{here}.out_proj.weight", (HIDDEN, HIDDEN)


def _glm(vocabulary: int) -> Tensors:
    for name, shape in _decoder("model.", LAYERS, (), vocabulary, head_norms=False):
        if "up_proj" in name:
            yield name.replace("up_proj", "gate_up_proj"), (2 * WIDE, HIDDEN)
        elif "gate_proj" not in name:
            yield name, shape


def _stablelm(vocabulary: int) -> Tensors:
    for name, shape in _decoder("model.", LAYERS, (), vocabulary, head_norms=False):
        yield name, shape
        if "norm" in name:
            yield f"{name.removesuffix('weight')}bias", shape


def _starcoder2(vocabulary: int) -> Tensors:
    """All matrices but the embeddings have biases, and so do the norms."""
    names = {"up_proj": "c_fc", "down_proj": "c_proj"}
    whole = partial(_decoder, "model.", LAYERS, (), head_norms=False)
    for name, shape in _renamed(whole, names)(vocabulary):
        if "gate_proj" not in name:
            yield name, shape
            if "embed" not in name:
                yield f"{name.removesuffix('weight')}bias", shape[:1]


_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def _qwen2_whole(vocabulary: int) -> Tensors:
    yield from _decoder("model.", LAYERS, (), vocabulary, head_norms=False, biases=True)
    yield "lm_head.weight", (vocabulary, HIDDEN)


def _mpnet(vocabulary: int) -> Tensors:
    yield "embeddings.word_embeddings.weight", (vocabulary, HIDDEN)
    yield "embeddings.position_embeddings.weight", (POSITIONS + 2, HIDDEN)
    yield from norm("embeddings.LayerNorm")
    yield "encoder.relative_attention_bias.weight", (32, HEADS)
    for layer in range(LAYERS):
        here = f"encoder.layer.{layer}"
        for part in "qkvo":
            yield from linear(f"{here}.attention.attn.{part}", HIDDEN, HIDDEN)
        yield from norm(f"{here}.attention.LayerNorm")
        yield from linear(f"{here}.intermediate.dense", WIDE, HIDDEN)
        yield from linear(f"{here}.output.dense", HIDDEN, WIDE)
        yield from norm(f"{here}.output.LayerNorm")
    yield from linear("pooler.dense", HIDDEN, HIDDEN)


def _distilbert(vocabulary: int) -> Tensors:
    yield "distilbert.embeddings.word_embeddings.weight", (vocabulary, HIDDEN)
    yield "distilbert.embeddings.position_embeddings.weight", (POSITIONS, HIDDEN)
    yield from norm("distilbert.embeddings.LayerNorm")
    for layer in range(LAYERS):
        here = f"distilbert.transformer.layer.{layer}"
        for part in ("q", "k", "v", "out"):
            yield from linear(f"{here}.attention.{part}_lin", HIDDEN, HIDDEN)
        yield from norm(f"{here}.sa_layer_norm")
        yield from linear(f"{here}.ffn.lin1", WIDE, HIDDEN)
        yield from linear(f"{here}.ffn.lin2", HIDDEN, WIDE)
        yield from norm(f"{here}.output_layer_norm")
    yield from linear("vocab_transform", HIDDEN, HIDDEN)


def _renamed(body: Weights, names: Mapping[str, str], narrow: int = 0) -> Weights:
    """The body's tensors under other names. narrow: the width of its embeddings; 0: unchanged."""

    def tensors(vocabulary: int) -> Tensors:
        for name, shape in body(vocabulary):
            if narrow and "embeddings." in name:
                shape = (*shape[:-1], narrow)
            for before, after in names.items():
                name = name.replace(before, after)
            yield name, shape

    return tensors


def _albert(vocabulary: int) -> Tensors:
    names = {
        "encoder.layer.0.": "encoder.albert_layer_groups.0.albert_layers.0.",
        "attention.self.": "attention.",
        "attention.output.": "attention.",
        "intermediate.dense": "ffn",
        "0.output.LayerNorm": "0.full_layer_layer_norm",
        "0.output.dense": "0.ffn_output",
    }
    for name, shape in _renamed(partial(_bert, "", POSITIONS, 2), names, 16)(vocabulary):
        if "layer.1." not in name:
            yield f"albert.{name}", shape
    yield from linear("albert.encoder.embedding_hidden_mapping_in", HIDDEN, 16)
    yield from linear("albert.pooler", HIDDEN, HIDDEN)


def _deberta(vocabulary: int) -> Tensors:
    projections = {f"self.{part}": f"self.{part}_proj" for part in ("query", "key", "value")}
    for name, shape in _renamed(partial(_bert, "", POSITIONS, 2), projections)(vocabulary):
        if "position_embeddings" not in name and "token_type" not in name:
            yield f"deberta.{name}", shape
    yield "deberta.encoder.rel_embeddings.weight", (2 * 16, HIDDEN)
    yield from norm("deberta.encoder.LayerNorm")


def _privacy(vocabulary: int) -> Tensors:
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        for part, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2), ("o", HIDDEN)):
            yield from linear(f"{here}.self_attn.{part}_proj", rows, HIDDEN)
        yield f"{here}.self_attn.sinks", (HEADS,)
        yield from linear(f"{here}.mlp.router", 4, HIDDEN)
        yield f"{here}.mlp.experts.gate_up_proj", (4, HIDDEN, 2 * WIDE)
        yield f"{here}.mlp.experts.gate_up_proj_bias", (4, 2 * WIDE)
        yield f"{here}.mlp.experts.down_proj", (4, WIDE, HIDDEN)
        yield f"{here}.mlp.experts.down_proj_bias", (4, HIDDEN)
        yield f"{here}.input_layernorm.weight", (HIDDEN,)
        yield f"{here}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield from linear("score", len(PRIVACY_LABELS), HIDDEN)


_ENCODER = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "max_position_embeddings": POSITIONS,
}
_BERT_CONFIG = _ENCODER | {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
_ROBERTA_CONFIG = _BERT_CONFIG | {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": POSITIONS + 2,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
_MODERNBERT_CONFIG = _ENCODER | {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "num_hidden_layers": LAYERS + 1,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_QWEN3_CONFIG = _ENCODER | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GEMMA3_CONFIG = _QWEN3_CONFIG | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "num_hidden_layers": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "use_bidirectional_attention": True,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_QWEN3_5_CONFIG = {
    **_QWEN3_CONFIG,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5TextModel"],
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": HIDDEN // HEADS,
    "linear_value_head_dim": HIDDEN // HEADS,
    "linear_num_key_heads": HEADS // 2,
    "linear_num_value_heads": HEADS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_QWEN2_CONFIG = {
    **_QWEN3_CONFIG,
    "model_type": "qwen2",
    "architectures": ["Qwen2Model"],
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
_LLAMA_CONFIG = _QWEN3_CONFIG | {
    "model_type": "llama",
    "architectures": ["LlamaModel"],
    "tie_word_embeddings": False,
}
_EUROBERT_CONFIG = _LLAMA_CONFIG | {
    "model_type": "eurobert",
    "architectures": ["EuroBertModel"],
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_MISTRAL_CONFIG = _LLAMA_CONFIG | {
    "model_type": "mistral",
    "architectures": ["MistralModel"],
    "sliding_window": 64,
}
_GEMMA2_CONFIG = _QWEN3_CONFIG | {
    "model_type": "gemma2",
    "architectures": ["Gemma2Model"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# The published configuration names the exact GELU, and means the approximate one.
_GEMMA_CONFIG = _QWEN3_CONFIG | {
    "model_type": "gemma",
    "architectures": ["GemmaModel"],
    "hidden_act": "gelu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GLM_CONFIG = _LLAMA_CONFIG | {
    "model_type": "glm",
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "pad_token_id": 0,
}
_STARCODER2_CONFIG = _LLAMA_CONFIG | {
    "model_type": "starcoder2",
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "sliding_window": None,
    "pad_token_id": 0,
}
_STABLELM_CONFIG = _LLAMA_CONFIG | {
    "model_type": "stablelm",
    "layer_norm_eps": 1e-5,
    "use_qkv_bias": False,
    "partial_rotary_factor": 0.5,
    "pad_token_id": 0,
}
_MPNET_CONFIG = _ENCODER | {
    "model_type": "mpnet",
    "architectures": ["MPNetModel"],
    "max_position_embeddings": POSITIONS + 2,
    "relative_attention_num_buckets": 32,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
_DISTILBERT_CONFIG = {
    "model_type": "distilbert",
    "architectures": ["DistilBertForMaskedLM"],
    "dim": HIDDEN,
    "hidden_dim": WIDE,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "activation": "gelu",
    "pad_token_id": 0,
}
_ELECTRA_CONFIG = _BERT_CONFIG | {
    "model_type": "electra",
    "architectures": ["ElectraForPreTraining"],
    "embedding_size": 16,
}
_ALBERT_CONFIG = _BERT_CONFIG | {
    "model_type": "albert",
    "architectures": ["AlbertModel"],
    "embedding_size": 16,
    "hidden_act": "gelu_new",
    "num_hidden_groups": 1,
    "inner_group_num": 1,
}
_DEBERTA_CONFIG = _BERT_CONFIG | {
    "model_type": "deberta-v2",
    "architectures": ["DebertaV2Model"],
    "layer_norm_eps": 1e-7,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_biased_input": False,
    "position_buckets": 16,
    "max_relative_positions": -1,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": HIDDEN,
}
_ONE_SCORE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_NAMED = {
    "id2label": {str(place): label for place, label in enumerate(LABELS)},
    "label2id": {label: place for place, label in enumerate(LABELS)},
}
_PRIVACY_CONFIG = _ENCODER | {
    "model_type": "openai_privacy_filter",
    "architectures": ["OpenAIPrivacyFilterForTokenClassification"],
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "id2label": {str(place): label for place, label in enumerate(PRIVACY_LABELS)},
    "label2id": {label: place for place, label in enumerate(PRIVACY_LABELS)},
}
_DENSE = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def _pooling(kind: str) -> dict[str, Any]:
    stated = {"word_embedding_dimension": HIDDEN, f"pooling_mode_{kind}": True}
    return {"pooling_mode_mean_tokens": False} | stated


_LAST, _MEAN = _pooling("lasttoken"), _pooling("mean_tokens")


def _scoring(config: dict[str, Any], name: str) -> dict[str, Any]:
    return config | _ONE_SCORE | {"architectures": [f"{name}ForSequenceClassification"]}


def _labelling(config: dict[str, Any], name: str) -> dict[str, Any]:
    return config | _NAMED | {"architectures": [f"{name}ForTokenClassification"]}


_GEMMA2_WEIGHTS = partial(_decoder, "model.", LAYERS, _GEMMA_NORMS, head_norms=False)
_BERT_WEIGHTS = partial(_bert, "bert.", POSITIONS, 2)
_ROBERTA_WEIGHTS = partial(_bert, "roberta.", POSITIONS + 2, 1)
_MODERNBERT_WEIGHTS = partial(_modernbert, "model.")
_MODERNBERT_HEAD = (("head.dense.weight", (HIDDEN, HIDDEN)), ("head.norm.weight", (HIDDEN,)))
_QWEN3_WEIGHTS = partial(_decoder, "model.", LAYERS, ())
_QWEN2_WEIGHTS = partial(_decoder, "", LAYERS, (), head_norms=False, biases=True)
_LLAMA_WEIGHTS = partial(_decoder, "", LAYERS, (), head_norms=False)
_POOLER = tuple(linear("bert.pooler.dense", HIDDEN, HIDDEN))
_DENSE_HEAD = tuple(linear("classifier.dense", HIDDEN, HIDDEN))
_SCORE, _LABELS = (tuple(linear("classifier", size, HIDDEN)) for size in (1, len(LABELS)))
_PRE = tuple(linear("pre_classifier", HIDDEN, HIDDEN))
_OUT = tuple(linear("classifier.out_proj", 1, HIDDEN))
_DEBERTA_POOLER = tuple(linear("pooler.dense", HIDDEN, HIDDEN))
_ELECTRA_WEIGHTS = _with(
    _renamed(partial(_bert, "", POSITIONS, 2), {}, 16),
    *linear("embeddings_project", HIDDEN, 16),
    outer="electra.",
)

FAMILIES: dict[str, Parts] = {
    "bert": (BERT, _BERT_CONFIG, partial(_bert, "", POSITIONS, 2),
             {"Pooling": _pooling("cls_token")}),
    "bert_relu": (BERT, _BERT_CONFIG | {"hidden_act": "relu"}, partial(_bert, "", POSITIONS, 2),
                  {"Pooling": _MEAN}),
    "xlm_roberta": (ROBERTA, _ROBERTA_CONFIG, partial(_bert, "", POSITIONS + 2, 1),
                    {"Pooling": _MEAN, "Normalize": {}}),
    "modernbert": (BERT, _MODERNBERT_CONFIG, partial(_modernbert, ""),
                   {"Pooling": _pooling("max_tokens")}),
    "qwen3": (QWEN, _QWEN3_CONFIG, partial(_decoder, "", LAYERS, ()),
              {"Pooling": _LAST, "Normalize": {}}),
    "qwen3_5": (QWEN, _QWEN3_5_CONFIG, partial(_qwen3_5, ""),
                {"Pooling": _LAST, "Normalize": {}}),
    "gemma3": (_GEMMA, _GEMMA3_CONFIG, partial(_decoder, "", 6, _GEMMA_NORMS), {
        "Pooling": _MEAN,
        "Dense1": {"in_features": HIDDEN, "out_features": 4 * HIDDEN, **_DENSE},
        "Dense2": {"in_features": 4 * HIDDEN, "out_features": HIDDEN, **_DENSE},
        "Normalize": {},
    }),
    "qwen2": (QWEN, _QWEN2_CONFIG, _QWEN2_WEIGHTS, {"Pooling": _LAST, "Normalize": {}}),
    "qwen2_both_ways": (QWEN, _QWEN2_CONFIG | {
        "architectures": ["Qwen2ForCausalLM"], "is_causal": False}, _qwen2_whole, {
        "Pooling": _MEAN,
        "Dense": {"in_features": HIDDEN, "out_features": 24, **_DENSE},
    }),
    "llama": (QWEN, _LLAMA_CONFIG, _LLAMA_WEIGHTS, {"Pooling": _pooling("weightedmean_tokens")}),
    "mistral": (QWEN, _MISTRAL_CONFIG, _LLAMA_WEIGHTS, {"Pooling": _LAST, "Normalize": {}}),
    "gemma": (_GEMMA, _GEMMA_CONFIG, _LLAMA_WEIGHTS, {"Pooling": _LAST, "Normalize": {}}),
    "gemma2": (_GEMMA, _GEMMA2_CONFIG, _GEMMA2_WEIGHTS, {"Pooling": _LAST, "Normalize": {}}),
    "mpnet": (ROBERTA, _MPNET_CONFIG, _mpnet, {"Pooling": _MEAN, "Normalize": {}}),
    "distilbert": (BERT, _DISTILBERT_CONFIG, _distilbert, {"Pooling": _MEAN}),
    "eurobert": (BERT, _EUROBERT_CONFIG, _LLAMA_WEIGHTS, {"Pooling": _MEAN}),
    "electra": (BERT, _ELECTRA_CONFIG, _ELECTRA_WEIGHTS, {"Pooling": _MEAN}),
    "albert": (BERT, _ALBERT_CONFIG, _albert, {"Pooling": _MEAN}),
    "deberta": (BERT, _DEBERTA_CONFIG, _deberta, {"Pooling": _MEAN}),
    "bert_rerank": (BERT, _scoring(_BERT_CONFIG, "Bert"),
                    _with(_BERT_WEIGHTS, *_POOLER, *_SCORE), {}),
    "xlm_roberta_rerank": (ROBERTA, _scoring(_ROBERTA_CONFIG, "XLMRoberta"),
                           _with(_ROBERTA_WEIGHTS, *_DENSE_HEAD, *_OUT), {}),
    "modernbert_rerank": (BERT, _scoring(_MODERNBERT_CONFIG | {"classifier_pooling": "mean"},
                                         "ModernBert"),
                          _with(_MODERNBERT_WEIGHTS, *_MODERNBERT_HEAD, *_SCORE), {}),
    "mpnet_rerank": (ROBERTA, _scoring(_MPNET_CONFIG, "MPNet"),
                     _with(_mpnet, *_DENSE_HEAD, *_OUT, outer="mpnet."), {}),
    "distilbert_rerank": (BERT, _scoring(_DISTILBERT_CONFIG, "DistilBert"),
                          _with(_distilbert, *_PRE, *_SCORE), {}),
    "electra_rerank": (BERT, _scoring(_ELECTRA_CONFIG, "Electra"),
                       _with(_ELECTRA_WEIGHTS, *_DENSE_HEAD, *_OUT), {}),
    "albert_rerank": (BERT, _scoring(_ALBERT_CONFIG, "Albert"), _with(_albert, *_SCORE), {}),
    "deberta_rerank": (BERT, _scoring(_DEBERTA_CONFIG, "DebertaV2"),
                       _with(_deberta, *_DEBERTA_POOLER, *_SCORE), {}),
    "qwen3_rerank": (QWEN, _QWEN3_CONFIG, _QWEN3_WEIGHTS, {}),
    "qwen3_score": (QWEN, _scoring(_QWEN3_CONFIG | {"pad_token_id": 0}, "Qwen3"),
                    _with(_QWEN3_WEIGHTS, ("score.weight", (1, HIDDEN))), {}),
    "glm_score": (QWEN, _scoring(_GLM_CONFIG, "Glm"),
                  _with(_glm, ("score.weight", (1, HIDDEN))), {}),
    "starcoder2_score": (QWEN, _scoring(_STARCODER2_CONFIG, "Starcoder2"),
                         _with(_starcoder2, ("score.weight", (1, HIDDEN))), {}),
    "stablelm_score": (QWEN, _scoring(_STABLELM_CONFIG, "StableLm"),
                       _with(_stablelm, ("score.weight", (1, HIDDEN))), {}),
    "gemma_rerank": (_GEMMA, _GEMMA_CONFIG | {"architectures": ["GemmaForCausalLM"]},
                     partial(_decoder, "model.", LAYERS, (), head_norms=False), {}),
    "qwen3_5_score": (QWEN, _scoring(_QWEN3_5_CONFIG, "Qwen3_5Text"),
                      _with(partial(_qwen3_5, "model."), ("score.weight", (1, HIDDEN))), {}),
    "bert_labels": (BERT, _labelling(_BERT_CONFIG, "Bert"), _with(_BERT_WEIGHTS, *_LABELS), {}),
    "xlm_roberta_labels": (ROBERTA, _labelling(_ROBERTA_CONFIG, "XLMRoberta"),
                           _with(_ROBERTA_WEIGHTS, *_LABELS), {}),
    "modernbert_labels": (BERT, _labelling(_MODERNBERT_CONFIG, "ModernBert"),
                          _with(_MODERNBERT_WEIGHTS, *_MODERNBERT_HEAD, *_LABELS), {}),
    "mpnet_labels": (ROBERTA, _labelling(_MPNET_CONFIG, "MPNet"),
                     _with(_mpnet, *_LABELS, outer="mpnet."), {}),
    "distilbert_labels": (BERT, _labelling(_DISTILBERT_CONFIG, "DistilBert"),
                          _with(_distilbert, *_LABELS), {}),
    "electra_labels": (BERT, _labelling(_ELECTRA_CONFIG, "Electra"),
                       _with(_ELECTRA_WEIGHTS, *_LABELS), {}),
    "deberta_labels": (BERT, _labelling(_DEBERTA_CONFIG, "DebertaV2"),
                       _with(_deberta, *_LABELS), {}),
    "privacy_labels": (QWEN, _PRIVACY_CONFIG, _privacy, {}),
}  # fmt: skip
LABELLERS = (
    *("bert_labels", "xlm_roberta_labels", "modernbert_labels", "mpnet_labels"),
    *("distilbert_labels", "electra_labels"),
    *("deberta_labels", "privacy_labels"),
)
CAUSAL = ("qwen3_5", "qwen2", "qwen2_both_ways", "llama", "mistral", "gemma", "gemma2")
EMBEDDERS = (
    *("bert", "bert_relu", "xlm_roberta", "modernbert", "qwen3", "gemma3", "mpnet"),
    *("distilbert", "electra", "albert", "deberta", "eurobert", *CAUSAL),
)
RERANKERS = (
    *("bert_rerank", "xlm_roberta_rerank", "modernbert_rerank", "qwen3_rerank"),
    *("qwen3_score", "mpnet_rerank", "distilbert_rerank", "electra_rerank", "albert_rerank"),
    *("deberta_rerank", "qwen3_5_score", "glm_score", "starcoder2_score"),
    *("stablelm_score", "gemma_rerank"),
)
TEXTS = (
    "paris",
    "The river of France is not the Moon.",
    "bread and butter, 3 times a day; what else is there to say of the long road to paris?",
    "a",
)
QUERY = "What is the river of paris?"
