"""Converts a llama-architecture GGUF file with a byte-level BPE tokenizer to a model directory.

GGUF stores weights, tokenizer and chat template in one file; MLX models are directories in the
layout of the Hugging Face hub. MLX can read GGUF files. This module converts the quantised weights
to dense float16, and undoes llama.cpp's reordering of the query and key projections.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

# MLX reads Q4_0, Q4_1 and Q8_0 as triplets of this group size, whatever the number of bits.
GROUP_SIZE = 32

# How GGUF marks special tokens, which text never produces (llama.cpp's LLAMA_TOKEN_TYPE_CONTROL).
CONTROL_TOKEN = 3

WHOLE_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class UnsupportedGGUF(Exception):
    """The file is valid, but of a kind that this converter does not support."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of the architecture, under their names in config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> "Shape":
        def integer(key: str) -> int:
            return int(metadata[f"llama.{key}"].item())

        hidden, heads = integer("embedding_length"), integer("attention.head_count")
        return cls(
            hidden_size=hidden,
            intermediate_size=integer("feed_forward_length"),
            num_hidden_layers=integer("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=integer("attention.head_count_kv"),
            head_dim=hidden // heads,
            max_position_embeddings=integer("context_length"),
            rms_norm_eps=float(metadata["llama.attention.layer_norm_rms_epsilon"].item()),
            rope_theta=float(metadata["llama.rope.freq_base"].item()),
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        )


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of `gguf` into `directory`, which must exist and be empty."""
    # With return_metadata, it returns a pair; the declared type also allows for other formats.
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors, metadata = loaded
    for key, expected in {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }.items():
        if metadata.get(key) != expected:
            raise UnsupportedGGUF(
                f"{gguf.name} has {key} = {metadata.get(key)!r}; only {expected!r} is known"
            )
    shape = Shape.of(metadata)
    weights = dense_weights(tensors, shape)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(directory / "config.json", model_config(shape, weights, metadata))
    write_json(directory / "generation_config.json", generation_config(metadata))
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config(shape, metadata))
    (directory / "chat_template.jinja").write_text(
        metadata["tokenizer.chat_template"], encoding="utf-8"
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def dense_weights(tensors: dict[str, mx.array], shape: Shape) -> dict[str, mx.array]:
    weights = {}
    for name in tensors:
        if not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        weight = dequantised(tensors, module)
        if module.endswith(".attn_q"):
            weight = in_half_order(weight, shape.num_attention_heads)
        elif module.endswith(".attn_k"):
            weight = in_half_order(weight, shape.num_key_value_heads)
        weights[f"{hub_name(module)}.weight"] = weight.astype(mx.float16)
    mx.eval(weights)
    return weights


def hub_name(module: str) -> str:
    if module in WHOLE_MODEL_NAMES:
        return WHOLE_MODEL_NAMES[module]
    _, layer, part = module.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}"


def dequantised(tensors: dict[str, mx.array], module: str) -> mx.array:
    weight = tensors[f"{module}.weight"]
    scales = tensors.get(f"{module}.scales")
    if scales is None:
        return weight
    # 32-bit words hold a row's values, and each scale covers GROUP_SIZE of them.
    bits = weight.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
    biases = tensors[f"{module}.biases"]
    # In float32, so that only the final conversion to float16 rounds.
    return mx.dequantize(
        weight,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=GROUP_SIZE,
        bits=bits,
    )


def in_half_order(weight: mx.array, heads: int) -> mx.array:
    """Return a weight with the rows of each head in the order of the hub.

    llama.cpp puts the two values that RoPE rotates together next to each other; in the hub's layout
    they are half a head apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def model_config(
    shape: Shape, weights: dict[str, mx.array], metadata: dict[str, Any]
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **vars(shape),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": token_id(metadata, "bos"),
        "eos_token_id": token_id(metadata, "eos"),
        "pad_token_id": token_id(metadata, "padding"),
        "dtype": "float16",
    }


def token_id(metadata: dict[str, Any], role: str) -> int:
    return int(metadata[f"tokenizer.ggml.{role}_token_id"].item())


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    # Both the end of a turn and the end of a document end an answer.
    ends = [token_id(metadata, "eos")]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if "<|endoftext|>" in tokens and tokens.index("<|endoftext|>") not in ends:
        ends.append(tokens.index("<|endoftext|>"))
    return {
        "bos_token_id": token_id(metadata, "bos"),
        "eos_token_id": ends,
        "pad_token_id": token_id(metadata, "padding"),
    }


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control_tokens(metadata)]
    )
    return tokenizer


def control_tokens(metadata: dict[str, Any]) -> list[str]:
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]


def tokenizer_config(shape: Shape, metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        # The generic class reads tokenizer.json unchanged.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[token_id(metadata, "bos")],
        "eos_token": tokens[token_id(metadata, "eos")],
        "pad_token": tokens[token_id(metadata, "padding")],
        "unk_token": tokens[token_id(metadata, "unknown")],
        "model_max_length": shape.max_position_embeddings,
    }
