"""Converts the GGUF file of SmolLM2-135M-Instruct to a model directory.

GGUF stores weights, tokenizer and chat template in one file; MLX models are directories in the
layout of the Hugging Face hub. MLX can read GGUF files. This module converts the quantised weights
to dense float16, and undoes llama.cpp's reordering of the query and key projections. The hash of
the file is in `default_model.LOCK`, so its sizes and token ids are written down here.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

# MLX reads Q4_0, Q4_1 and Q8_0 as triplets of this group size, whatever the number of bits.
_GROUP_SIZE = 32
# How GGUF marks special tokens, which text never produces (llama.cpp's LLAMA_TOKEN_TYPE_CONTROL).
_CONTROL_TOKEN = 3
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "dtype": "float16",
}
_GENERATION = {
    "bos_token_id": 1,
    # Both the end of a turn and the end of a document end an answer.
    "eos_token_id": [2, 0],
    "pad_token_id": 2,
    # At the usual temperature of 1, and even at 0.2, a model of this size often writes nonsense.
    "do_sample": False,
}
_TOKENIZER = {
    # The generic class reads tokenizer.json unchanged.
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": False,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 8192,
}
_HEADS = {"attn_q": _CONFIG["num_attention_heads"], "attn_k": _CONFIG["num_key_value_heads"]}
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
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


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of `gguf` into `directory`, which must exist and be empty."""
    # With return_metadata, it returns a pair; the declared type also allows for other formats.
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors, metadata = loaded
    weights = _dense_weights(tensors)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    _tokenizer(metadata).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], "utf-8")
    for name, content in {
        "config": _CONFIG,
        "generation_config": _GENERATION,
        "tokenizer_config": _TOKENIZER,
    }.items():
        (directory / f"{name}.json").write_text(f"{json.dumps(content, indent=2)}\n", "utf-8")


def _dense_weights(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    weights = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        weight, part = _dequantised(tensors, module), module.rpartition(".")[2]
        if part in _HEADS:
            weight = in_half_order(weight, _HEADS[part])
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
