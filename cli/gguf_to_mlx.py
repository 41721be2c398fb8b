"""Converts a llama-architecture GGUF file with a byte-level BPE tokenizer to a model directory.

GGUF stores weights, tokenizer and chat template in one file; MLX models are directories in the
layout of the Hugging Face hub. MLX can read GGUF files. This module converts the quantised weights
to dense float16, and undoes llama.cpp's reordering of the query and key projections.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_KNOWN = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}
# MLX reads Q4_0, Q4_1 and Q8_0 as triplets of this group size, whatever the number of bits.
_GROUP_SIZE = 32
# How GGUF marks special tokens, which text never produces (llama.cpp's LLAMA_TOKEN_TYPE_CONTROL).
_CONTROL_TOKEN = 3
_SIZES = {  # names in config.json → in GGUF
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk": "model.layers",
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


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of `gguf` into `directory`, which must exist and be empty."""
    # With return_metadata, it returns a pair; the declared type also allows for other formats.
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors, metadata = loaded
    for key, expected in _KNOWN.items():
        if metadata.get(key) != expected:
            raise UnsupportedGGUF(
                f"{gguf.name} has {key} = {metadata.get(key)!r}; only {expected!r} is known"
            )
    config = _config(metadata)
    weights = _dense_weights(tensors, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    _tokenizer(metadata).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], "utf-8")
    for name, content in {
        "config": config,
        "generation_config": _generation_config(metadata),
        "tokenizer_config": _tokenizer_config(metadata),
    }.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / f"{name}.json").write_text(f"{text}\n", "utf-8")


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: int(metadata[f"llama.{key}"].item()) for name, key in _SIZES.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **sizes,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "rms_norm_eps": float(metadata["llama.attention.layer_norm_rms_epsilon"].item()),
        "rope_theta": float(metadata["llama.rope.freq_base"].item()),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "attention_bias": False,
        "mlp_bias": False,
        **_token_ids(metadata),
        "dtype": "float16",
    }


def _token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{role}_token_id": int(metadata[f"tokenizer.ggml.{name}_token_id"].item())
        for role, name in roles.items()
    }


def _dense_weights(tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        weight, part = _dequantised(tensors, module), module.rpartition(".")[2]
        if part in heads:
            weight = in_half_order(weight, heads[part])
        named = ".".join(_MODULES.get(word, word) for word in module.split("."))
        weights[f"{named}.weight"] = weight.astype(mx.float16)
    mx.eval(weights)
    return weights


def _dequantised(tensors: dict[str, mx.array], module: str) -> mx.array:
    weight = tensors[f"{module}.weight"]
    scales = tensors.get(f"{module}.scales")
    if scales is None:
        return weight
    # 32-bit words hold a row's values, and each scale covers _GROUP_SIZE of them. In float32, so
    # that only the final conversion to float16 rounds.
    bits = weight.shape[-1] * 32 // (scales.shape[-1] * _GROUP_SIZE)
    triplet = weight, scales.astype(mx.float32), tensors[f"{module}.biases"].astype(mx.float32)
    return mx.dequantize(*triplet, group_size=_GROUP_SIZE, bits=bits)


def in_half_order(weight: mx.array, heads: int) -> mx.array:
    """Return a weight with the rows of each head in the order of the hub.

    llama.cpp puts the two values that RoPE rotates together next to each other; in the hub's layout
    they are half a head apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens, ids = metadata["tokenizer.ggml.tokens"], _token_ids(metadata)
    # Both the end of a turn and the end of a document end an answer.
    ends = [tokens.index("<|endoftext|>")] if "<|endoftext|>" in tokens else []
    return {**ids, "eos_token_id": list(dict.fromkeys([ids["eos_token_id"], *ends]))}


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
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
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"].tolist(), strict=True)
    special = (token for token, kind in kinds if kind == _CONTROL_TOKEN)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = _token_ids(metadata)
    ids["unk_token_id"] = int(metadata["tokenizer.ggml.unknown_token_id"].item())
    return {
        # The generic class reads tokenizer.json unchanged.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **{name.removesuffix("_id"): tokens[number] for name, number in ids.items()},
        "model_max_length": int(metadata["llama.context_length"].item()),
    }
