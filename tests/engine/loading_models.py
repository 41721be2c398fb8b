"""Writes small model directories with random weights, in the real format."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: special tokens first, then one token per byte."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [],
        BpeTrainer(
            vocab_size=CONFIG["vocab_size"],
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )


def write_model(
    directory: Path, *, dtype: str = "bfloat16", bits: int = 0, shards: int = 1, **config: Any
) -> Path:
    """A checkpoint of a model with random weights; `bits` quantises it, `shards` splits it."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = CONFIG | config
    module = importlib.import_module(f"mlx_lm.models.{whole['model_type']}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(whole))
    model.set_dtype(getattr(mx, dtype))
    if bits:
        whole["quantization"] = {"group_size": 32, "bits": bits}
        quantize(model, group_size=32, bits=bits)
    write_weights(directory, dict(tree_flatten(model.parameters())), shards)
    (directory / "config.json").write_text(json.dumps(whole))
    write_tokenizer(directory)
    return directory


def read_weights(directory: Path) -> dict[str, mx.array]:
    """The weights of a checkpoint in one file."""
    held = mx.load(str(directory / "model.safetensors"))
    assert isinstance(held, dict)
    return held


def write_weights(directory: Path, weights: dict[str, mx.array], shards: int = 1) -> None:
    """Weight files named as on the hub: numbered and with an index if there are several."""
    names = sorted(weights)
    files = {}
    for number in range(shards):
        part = {name: weights[name] for name in names[number::shards]}
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        mx.save_safetensors(str(directory / file), part, metadata={"format": "mlx"})
        files.update(dict.fromkeys(part, file))
    if shards > 1:
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
