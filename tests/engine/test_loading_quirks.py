"""Folders as people have them: whatever mlx-lm loads must load here, and mean the same.

Each quirk changes a small checkpoint. The reference is `mlx_lm.load` of the same folder: its
logits, its tokens of a text and of a chat, and its end tokens.
"""

from __future__ import annotations

import io
import shutil
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import sentencepiece
from mlx_lm.models.cache import make_prompt_cache

from backend.engine.errors import InvalidRequest
from backend.engine.load_request import LoadRequest
from backend.engine.loading.loader import load
from backend.engine.request import ChatPrompt
from tests.engine.folder_changes import (
    BOM,
    INDEX,
    Change,
    added_in_config,
    all_of,
    before,
    config,
    edit,
    fifo,
    files,
    hole,
    link,
    linked_folder,
    of_type,
    padded_header,
    put,
    quantised,
    quantised_by_layer,
    read_json,
    renamed,
    snapshot,
    tokens,
    untied,
    weights,
    without,
)
from tests.engine.loading_models import read_weights, write_model, write_weights
from tests.engine.loads import at_once

TEXT, MESSAGES = "The quick brown fox", [{"role": "user", "content": "What is it?"}]
TURN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def nested(path: Path) -> None:
    """A text model in the form of a model that also sees, as conversions write it."""
    write_model(path, dtype="float32", model_type="qwen3")
    text = read_json(path, "config.json")
    renamed(lambda name: f"model.language_{name}")(path)
    whole = {"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 1}}
    put("config.json", whole)(path)


def headless(path: Path) -> None:
    held = read_weights(path)
    write_weights(path, {name: held[name] for name in held if name != "lm_head.weight"})


def by_another_program(method: str, mode: str, group_size: int, bits: int) -> Change:
    """Weights quantised in a mode, described as another program describes them."""
    stated = {"quant_method": method}
    return all_of(
        quantised_by_layer(mode, group_size, bits),
        without("config.json", "quantization"),
        config(quantization_config=stated),
    )


def nested_and_quantised(path: Path) -> None:
    """As mlx-vlm names the layers of a text part in the settings of quantisation."""
    of_type("qwen3")(path)
    quantised_by_layer("affine", 32, 4, model__layers__0__mlp__up_proj=FINER)(path)
    text = read_json(path, "config.json")
    renamed(lambda name: f"language_model.{name}")(path)
    found = text.pop("quantization").items()
    stated = {name.replace("model.", "language_model.model.", 1): each for name, each in found}
    whole = {"model_type": "qwen3_vl", "text_config": text}
    put("config.json", whole | {"vision_config": {"depth": 1}, "quantization": stated})(path)


def twice(path: Path) -> None:
    """Tensors that are in two files, as after a conversion into a folder that was not empty."""
    held = read_weights(path)
    (path / "model.safetensors").unlink()
    for at, names in enumerate((sorted(held)[:12], sorted(held)[8:])):
        part = {name: held[name] for name in names}
        mx.save_safetensors(str(path / f"model-{at + 1:05}-of-00002.safetensors"), part)


def vocabulary_alone(path: Path) -> None:
    model = read_json(path, "tokenizer.json")["model"]
    put("vocab.json", model["vocab"])(path)
    put("merges.txt", "#version: 0.2")(path)
    (path / "tokenizer.json").unlink()
    tokens(tokenizer_class="GPT2Tokenizer")(path)


def sentencepiece_alone(name: str, kind: str) -> Change:
    """The vocabulary of SentencePiece, and no tokenizer.json."""

    def change(path: Path) -> None:
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the quick brown fox jumps", "what is it then"] * 20),
            model_writer=written,
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        write_model(path, dtype="float32", vocab_size=320)
        (path / "tokenizer.json").unlink()
        put(name, written.getvalue())(path)
        ends = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
        put("tokenizer_config.json", ends | {"tokenizer_class": kind})(path)

    return change


FINER = {"group_size": 32, "bits": 8}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
ONLY_HALF = {"group_size": 64, "bits": 8, "mode": "affine"}
LEFT_OVER = {
    "model__layers__0__self_attn__rotary_emb__inv_freq": mx.zeros(16),
    "model__layers__1__self_attn__rotary_emb__inv_freq": mx.zeros(16),
}
LISTED = [{"name": "default", "template": TURN}, {"name": "tool_use", "template": "tools"}]
TOKEN = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "single_word": False}
WHOLE_INDEX = {"metadata": {"total_size": 1}, "weight_map": {}}
QUANTISED = {"group_size": 32, "bits": 4}
CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDED = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}

QUIRKS: dict[str, Change] = {
    "nothing": lambda path: None,
    # Files that nothing reads.
    "a FIFO in .git": fifo(".git/index"),
    "a FIFO in a folder": fifo("logs/pipe"),
    "a FIFO": fifo("control"),
    "a FIFO named as a configuration": fifo("training_config.json"),
    "a large json": hole("measurement.json", 17 << 20),
    "a large configuration of something else": hole("trainer_config.json", 17 << 20),
    "a large table of tokens": hole("token_counts.json", 17 << 20),
    "a large jsonl": hole("eval.jsonl", 65 << 20),
    "a large txt": hole("train_log.txt", 65 << 20),
    "a large template of something else": hole("report.jinja", 2 << 20),
    "json without sense": put("notes.json", "not json"),
    "a folder of a training": put("checkpoint-500/config.json", "{"),
    "a folder with junk weights": put("original/model.safetensors", b"junk"),
    "a folder named as a file": lambda path: (path / "added_notes.json").mkdir(),
    "a dangling link": link("README.md", "nowhere"),
    "a link to itself": link("loop", "loop"),
    "a file of macOS": put("._model.safetensors", b"\x00\x05\x16\x07"),
    "a file of Finder": put(".DS_Store", b"\x00\x01"),
    "a file of Git": put(".gitattributes", "*.safetensors filter=lfs"),
    "Python beside the weights": put("modeling_own.py", "raise SystemExit"),
    "an image": put("logo.png", b"\x89PNG"),
    "PyTorch's weights beside": put("pytorch_model.bin", b"\x80"),
    "GGUF beside": put("model.gguf", b"GGUF"),
    "Mistral's weights beside": put("consolidated.safetensors", b"junk"),
    "an adapter beside": all_of(
        put("adapter_config.json", {"r": 8}), put("adapters.safetensors", b"junk")
    ),
    "a processor's broken file": put("preprocessor_config.json", "{"),
    "a broken template of a processor": put("chat_template.json", "{"),
    # Where the folder is.
    "the hub's cache": snapshot,
    "a link to the folder": linked_folder,
    "a name with a space": lambda path: path.rename(path.with_name("my model (v2)")),
    "a name in Unicode": lambda path: path.rename(path.with_name("modèle-模型")),
    "a name with dots": lambda path: path.rename(path.with_name("Model.v1.5-4bit")),
    # Weights.
    "left-over frequencies": weights(**LEFT_OVER),
    "a head that is tied": lambda path: weights(
        lm_head__weight=read_weights(path)["model.embed_tokens.weight"]
    )(path),
    "a head of its own": untied,
    "a tied head that its family gives up": all_of(
        of_type("gemma3_text", sliding_window_pattern=2, query_pre_attn_scalar=32),
        headless,
        config(tie_word_embeddings=True),
    ),
    "tying that is not stated": without("config.json", "tie_word_embeddings"),
    "a file with a number": files("model-00001-of-00001.safetensors"),
    "odd names": files("model.00.safetensors", "model.01.safetensors"),
    "odd names in the index": files(
        "model_a.safetensors", "model-b.safetensors", index=WHOLE_INDEX
    ),
    "an index of other files": all_of(
        put(INDEX, {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00002.bin"}})
    ),
    "an index that names a file too many": put(
        INDEX,
        {
            "weight_map": {
                "model.norm.weight": "model.safetensors",
                "mtp.fc.weight": "model-mtp.safetensors",
            }
        },
    ),
    "a broken index": put(INDEX, "{"),
    "an index without a map": put(INDEX, {"metadata": {}}),
    "an empty index": put(INDEX, ""),
    "a shard of another conversion": lambda path: mx.save_safetensors(
        str(path / "model-00002-of-00003.safetensors"),
        {name.replace("__", "."): array for name, array in LEFT_OVER.items()},
    ),
    "a header with metadata and spaces": padded_header,
    "a quantised model": quantised(quantization=QUANTISED),
    "a quantised model with both names": quantised(
        quantization=QUANTISED, quantization_config=QUANTISED
    ),
    "a quantised model with a layer's own bits": quantised(
        quantization=QUANTISED | {"model.layers.0.mlp.up_proj": QUANTISED}
    ),
    "a quantised model with null beside": quantised(
        quantization=QUANTISED, quantization_config=None
    ),
    "mxfp4": quantised_by_layer("mxfp4", 32, 4),
    "mxfp8": quantised_by_layer("mxfp8", 32, 8),
    "nvfp4": quantised_by_layer("nvfp4", 16, 4),
    "three bits": quantised_by_layer("affine", 64, 3),
    "layers with more bits": quantised_by_layer(
        "affine", 32, 4, model__layers__0__mlp__down_proj=FINER, model__embed_tokens=FINER
    ),
    "layers with another mode": quantised_by_layer(
        "mxfp4", 32, 4, model__embed_tokens=ONLY_HALF, model__layers__1__mlp__up_proj=ONLY_HALF
    ),
    "layers that are not quantised": quantised_by_layer(
        "affine", 32, 4, model__embed_tokens=False, model__layers__1__mlp__up_proj=False
    ),
    "settings of layers that are not there": quantised_by_layer(
        "affine", 32, 4, model__layers__9__mlp__up_proj=FINER, vision_tower=False
    ),
    "a text part with settings of its layers": nested_and_quantised,
    "mxfp4 of another program": by_another_program("mxfp4", "mxfp4", 32, 4),
    "mxfp8 of another program": by_another_program("mxfp8", "mxfp8", 32, 8),
    "settings in a file of ModelOpt": all_of(
        quantised_by_layer("nvfp4", 16, 4),
        without("config.json", "quantization"),
        put(
            "hf_quant_config.json",
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
        ),
    ),
    "dense again after bitsandbytes": config(
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    "dense again after FP8": config(
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "no settings of quantisation": config(quantization_config={}),
    "tensors in two files": twice,
    "a browser's copy of the weights": lambda path: put(
        "model (1).safetensors", (path / "model.safetensors").read_bytes()
    )(path),
    "an empty tensor": weights(model__layers__0__self_attn__rotary_emb__inv_freq=mx.zeros((0,))),
    "six digits": files("model-000001-of-000002.safetensors", "model-000002-of-000002.safetensors"),
    "numbers in capitals": files(
        "model-00001-OF-00002.safetensors", "model-00002-OF-2.safetensors"
    ),
    "numbers at the end": files("model.safetensors-1-of-1.safetensors"),
    "a list for an index": put(INDEX, []),
    "null in the index": put(INDEX, {"metadata": None, "weight_map": None}),
    "pointers of Git LFS beside": all_of(
        put("pytorch_model.bin", LFS), put("tokenizer.model", LFS), put("assets/a.png", LFS)
    ),
    "streams of Windows": all_of(
        put("model.safetensors:Zone.Identifier", "[ZoneTransfer]"), put("desktop.ini", "[x]")
    ),
    "downloads of the hub's client": all_of(
        put(".cache/huggingface/download/config.json.metadata", "a"),
        put(".cache/huggingface/download/model.safetensors.lock", ""),
        put("model-00001-of-00002.safetensors.incomplete", b"junk"),
    ),
    "files of other engines": all_of(
        put("onnx/model_q4.onnx_data", b"x"),
        put("tf_model.h5", b"x"),
        put("coreml/model.mlpackage/Manifest.json", "{"),
        put("m-Q4_K_M.gguf", b"GGUF"),
        put("mmproj-f16.gguf", b"GGUF"),
    ),
    "files of ComfyUI": all_of(
        put("model_index.json", "{"), put("text_encoders/qwen.safetensors", b"junk")
    ),
    "files of a trainer": all_of(
        put("trainer_state.json", "{"), put("optimizer.pt", b"x"), put("zero_to_fp32.py", "x=")
    ),
    "a file for .git": put(".git", "gitdir: ../somewhere"),
    "a hidden folder": lambda path: path.rename(path.with_name(".model")),
    "a name with a line break": lambda path: path.rename(path.with_name("my\nmodel")),
    "a name with a pattern": lambda path: path.rename(path.with_name("mo*d?l")),
    # config.json
    "null for quantization": config(quantization=None, quantization_config=None),
    "a type of before": config(torch_dtype="float32"),
    "a type as code": config(torch_dtype="torch.float32"),
    "a type of today": config(dtype="float32"),
    "null for the type": config(torch_dtype=None, dtype=None),
    "a type for each part": config(dtype={"": "float32", "vision_config": "float16"}),
    "no architectures": config(architectures=None),
    "an architecture as text": config(architectures="LlamaForCausalLM"),
    "an architecture of a classifier's base": config(architectures=["LlamaModel"]),
    "null for the scaling": config(rope_scaling=None, rope_parameters=None),
    "a plain scaling": config(rope_scaling={"type": "default"}),
    "a plain scaling with today's name": config(rope_scaling={"rope_type": "default"}),
    "a scaling under both names": config(
        rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0}
    ),
    "a base as an integer": config(rope_theta=10000),
    "no head size": without("config.json", "head_dim"),
    "no number of heads for KV": of_type("llama", num_key_value_heads=2),
    "one end token": config(eos_token_id=1),
    "a list of end tokens": config(eos_token_id=[1, 2]),
    "an empty list of end tokens": config(eos_token_id=[]),
    "null for the end token": config(eos_token_id=None),
    "no end token": without("config.json", "eos_token_id"),
    "an end token that the model lacks": config(eos_token_id=[0, 5000]),
    "an end token that is none": config(eos_token_id=-1, bos_token_id=-1),
    "CRLF in the configuration": lambda path: put(
        "config.json", (path / "config.json").read_bytes().replace(b", ", b",\r\n")
    )(path),
    "a key that is twice there": lambda path: put(
        "config.json", '{"model_type": "gpt2",' + (path / "config.json").read_text()[1:]
    )(path),
    "null for the head size": config(head_dim=None),
    "a base in both forms": config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "a scaling by parts": config(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    ),
    "a scaling for images": config(rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}),
    "no context": without("config.json", "max_position_embeddings"),
    "null values": config(
        pad_token_id=None, attention_bias=False, sliding_window=None, num_experts=None, task=None
    ),
    "code of another library": config(
        auto_map={"AutoConfig": "configuration_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    ),
    "an empty text part": config(text_config={}, vision_config=None),
    "a text part that is none": config(text_config=["llama"]),
    "a tower without weights": config(vision_config={"depth": 1}, image_token_id=5),
    "a larger vocabulary": of_type("llama", vocab_size=320),
    "a window": of_type(
        "llama", sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "a left-over head": all_of(
        of_type("mimo"), weights(model__mtp_layers__0__input_layernorm__weight=mx.ones(64))
    ),
    "a value that is not finite": lambda path: put(
        "config.json", (path / "config.json").read_text()[:-1] + ', "limit": Infinity}'
    )(path),
    "a value that is tagged": config(time_step_limit=[0.0, {"__float__": "Infinity"}]),
    "an own name for the family": config(model_type="mistral"),
    "an encoder and decoder by mistake": config(is_encoder_decoder=True),
    "a text part in a model that sees": nested,
    "a large number of something else": config(
        max_window_layers=1 << 20, num_attention_layers=5000
    ),
    "experts that are not there": config(num_experts=0, n_routed_experts=None),
    "names of labels": config(id2label={"0": "A"}, label2id={"A": 0}, num_labels=1),
    "no code file": config(model_file=None),
    # generation_config.json
    "generation": put("generation_config.json", {"eos_token_id": [0, 1], "temperature": 0.6}),
    "null in generation": put("generation_config.json", {"eos_token_id": None, "top_k": None}),
    "an empty generation": put("generation_config.json", {}),
    "a generation of no bytes": put("generation_config.json", ""),
    "a broken generation": put("generation_config.json", '{"eos_token_id": 1,}'),
    "a generation with a byte order mark": put("generation_config.json", BOM + b"{}"),
    "texts in generation": put("generation_config.json", {"eos_token_id": ["1"], "top_p": "x"}),
    "an end token as text in generation": put("generation_config.json", {"eos_token_id": "1"}),
    "no number in generation": put("generation_config.json", '{"temperature": NaN}'),
    # Tokenizers.
    "today's fields of a tokenizer": tokens(
        backend="tokenizers",
        is_local=True,
        local_files_only=False,
        model_specific_special_tokens={"turn_token": "<|im_start|>"},
    ),
    "files of another machine": tokens(
        tokenizer_file="/home/u/tokenizer.json", name_or_path="/home/u/m", vocab_file=None
    ),
    "null for special tokens": tokens(extra_special_tokens=None, additional_special_tokens=None),
    "an added token with another id": put("added_tokens.json", {"<|im_end|>": 77}),
    "merges as texts": lambda path: put(
        "tokenizer.json",
        {
            **(found := read_json(path, "tokenizer.json")),
            "model": found["model"] | {"merges": [" ".join(m) for m in found["model"]["merges"]]},
        },
    )(path),
    "a vocabulary without tokenizer.json": vocabulary_alone,
    "SentencePiece alone": sentencepiece_alone("tokenizer.model", "LlamaTokenizer"),
    "SentencePiece's numbered file alone": sentencepiece_alone(
        "tokenizer.model.v3", "LlamaTokenizer"
    ),
    "SentencePiece for Gemma alone": sentencepiece_alone("tokenizer.model", "GemmaTokenizer"),
    "no configuration of a tokenizer": without("tokenizer_config.json"),
    "Qwen's tokenizer": tokens(tokenizer_class="Qwen2Tokenizer"),
    "Qwen's fast tokenizer": tokens(tokenizer_class="Qwen2TokenizerFast"),
    "Llama's tokenizer": tokens(tokenizer_class="LlamaTokenizer"),
    "Llama's fast tokenizer": tokens(tokenizer_class="LlamaTokenizerFast"),
    "GPT-2's tokenizer": tokens(tokenizer_class="GPT2Tokenizer"),
    "a tokenizer's cuts": edit("tokenizer.json", truncation=CUT, padding=PADDED),
    "code of a tokenizer": tokens(auto_map={"AutoTokenizer": ["tokenization_own.T", None]}),
    "Cohere's tokenizer": tokens(tokenizer_class="CohereTokenizerFast"),
    "a tokenizer of no kind": tokens(tokenizer_class="PreTrainedTokenizer"),
    "today's tokenizer": tokens(tokenizer_class="TokenizersBackend"),
    "null for the tokenizer": tokens(tokenizer_class=None),
    "no class of a tokenizer": without("tokenizer_config.json", "tokenizer_class"),
    "a tokenizer that nobody knows": tokens(tokenizer_class="GoneTokenizer"),
    "a tokenizer of mlx-lm": tokens(tokenizer_class="NewlineTokenizer"),
    "a map to no code": tokens(auto_map={}),
    "a length without end": tokens(model_max_length=1e30),
    "null for the length": tokens(model_max_length=None),
    "added tokens in the configuration": added_in_config(special=True),
    "added tokens that are not special": added_in_config(special=False),
    "an unknown added token": tokens(
        added_tokens_decoder={"259": {**TOKEN, "content": "<more>", "special": True}}
    ),
    "a file of added tokens": put("added_tokens.json", {"<|im_end|>": 2}),
    "an empty file of added tokens": put("added_tokens.json", {}),
    "a broken file of added tokens that is not read": all_of(
        added_in_config(special=True), put("added_tokens.json", "")
    ),
    "a list of added tokens that is not read": all_of(
        added_in_config(special=True), put("added_tokens.json", [])
    ),
    "a broken map of special tokens that is not read": all_of(
        added_in_config(special=True), put("special_tokens_map.json", "{")
    ),
    "a map of special tokens": put("special_tokens_map.json", {"eos_token": "<|im_end|>"}),
    "a map of special tokens with objects": put("special_tokens_map.json", {"eos_token": TOKEN}),
    "an end token as an added token": tokens(eos_token={"__type": "AddedToken", **TOKEN}),
    "no end token of a tokenizer": without("tokenizer_config.json", "eos_token"),
    "null for tokens": tokens(bos_token=None, pad_token=None, unk_token=None),
    "other special tokens": tokens(additional_special_tokens=["<|im_start|>"]),
    "special tokens as objects": tokens(extra_special_tokens={"turn_token": "<|im_start|>"}),
    "special tokens as a list": tokens(extra_special_tokens=["<|im_start|>"]),
    "a tokenizer that cleans up": tokens(clean_up_tokenization_spaces=True),
    "an end after each text": tokens(add_eos_token=True, add_bos_token=False),
    "padding on the left": tokens(padding_side="left", truncation_side="left"),
    "values of a tokenizer without sense": tokens(legacy=None, spaces_between_special_tokens=False),
    "a vocabulary beside": all_of(put("vocab.json", {"a": 0}), put("merges.txt", "#version: 0.2")),
    "a broken vocabulary beside": put("vocab.json", ""),
    "a model of SentencePiece beside": put("tokenizer.model", b"junk"),
    "a table of tiktoken beside": put("qwen.tiktoken", b""),
    "tekken.json beside": put("tekken.json", {}),
    "a tokenizer of bytes, which has no vocabulary": all_of(
        without("tokenizer.json"),
        put("tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}),
    ),
    # Chat templates.
    "a processor's list that has no templates": all_of(
        without("tokenizer_config.json", "chat_template"),
        put("chat_template.json", {"chat_template": ["x"]}),
    ),
    "no template": without("tokenizer_config.json", "chat_template"),
    "null for the template": tokens(chat_template=None),
    "an empty template": tokens(chat_template=""),
    "a number as the template": tokens(chat_template=5),
    "true for the template": tokens(chat_template=True),
    "an empty list of templates": tokens(chat_template=[]),
    "no templates with names": tokens(chat_template={}),
    "a number as a template with a name": tokens(chat_template={"default": 5}),
    "a number as a processor's template": all_of(
        without("tokenizer_config.json", "chat_template"),
        put("chat_template.json", {"chat_template": 5}),
    ),
    "a template in a file": put("chat_template.jinja", TURN),
    "an empty file of a template": put("chat_template.jinja", ""),
    "a template with a byte order mark": put("chat_template.jinja", BOM + TURN.encode()),
    "a template with CRLF": put("chat_template.jinja", TURN.replace("%}", "%}\r\n").encode()),
    "templates with names": tokens(chat_template=LISTED),
    "templates in files": all_of(
        put("chat_template.jinja", TURN),
        put("additional_chat_templates/tool_use.jinja", "tools"),
    ),
    "templates as an object": tokens(chat_template={"default": TURN, "tool_use": "tools"}),
    "templates without a default": tokens(chat_template=LISTED[1:]),
    "a broken template": put("chat_template.jinja", "{% for %}"),
    "a template that refuses": put("chat_template.jinja", "{{ raise_exception('no') }}"),
    "a template with generation marks": put(
        "chat_template.jinja",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    ),
    "a template with the year": put(
        "chat_template.jinja", "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    ),
    "a template that breaks off": put(
        "chat_template.jinja", "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    ),
    "a template of a library's": tokens(tool_parser_type="json_tools"),
}
# What mlx-lm refuses, but other programs, or an earlier mlx-lm, load.
MORE: dict[str, Change] = {
    **{
        f"a byte order mark in {name}": before(name, BOM)
        for name in ("config.json", "tokenizer_config.json", "tokenizer.json")
    },
    "a byte order mark in special_tokens_map.json": put(
        "special_tokens_map.json", BOM + b'{"eos_token": "<|im_end|>"}'
    ),
    "an end token as a float": config(eos_token_id=[0.0]),
    "an end token as text": config(eos_token_id="0"),
    "end tokens as texts": config(eos_token_id=["0", "1"]),
    "a context as text": config(max_position_embeddings="2048"),
    "a context as a float": config(max_position_embeddings=2048.0),
    "values of another type": config(use_cache="yes", id2label=[], transformers_version=5),
    "a name with brackets": lambda path: path.rename(path.with_name("model [8bit]")),
    "an earlier name": files("weights.00.safetensors"),
    "earlier names": files("weights.00.safetensors", "weights.01.safetensors"),
    "names that only the index has": files(
        "part-a.safetensors",
        "part-b.safetensors",
        index={"weight_map": {"a": "part-a.safetensors", "b": "part-b.safetensors"}},
    ),
}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quirks") / "plain", dtype="float32")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.mark.parametrize("name", QUIRKS)
def test_what_mlx_lm_loads_is_loaded(name: str, folder: Path) -> None:
    path = QUIRKS[name](folder) or folder
    assert here(path) == of_mlx_lm(path)


@pytest.mark.parametrize("name", MORE)
def test_what_other_programs_load_is_loaded(name: str, folder: Path) -> None:
    expected = of_mlx_lm(folder)
    path = MORE[name](folder) or folder
    assert here(path) == expected


class Meaning:
    """What a checkpoint computes: logits, and tokens of a text and a chat; None for no chat."""

    def __init__(self, model: Any, text: list[int], chat: list[int] | None, ends: set[int]) -> None:
        self.logits: mx.array = model(mx.array([[*range(5, 40)]]), cache=make_prompt_cache(model))
        self.tokens = (text, chat or None)
        self.ends = {end for end in ends if 0 <= end < self.logits.shape[-1]}

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Meaning)
        assert self.tokens == other.tokens
        assert self.ends >= other.ends
        return bool(mx.allclose(self.logits, other.logits, atol=1e-5))

    def __repr__(self) -> str:
        return f"{self.tokens} {self.ends} {self.logits}"


def of_mlx_lm(path: Path) -> Meaning:
    model, tokenizer = mlx_lm.load(str(path))
    try:
        chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    except Exception:  # it has no template, or one that fails
        chat = None
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    ends = {int(one) for one in tokenizer.eos_token_ids}
    return Meaning(model, text, chat, ends)


def here(path: Path) -> Meaning:
    engine, _, served = at_once(load(LoadRequest("it", str(path)), 1, threading.Event()))
    assert engine is not None
    prompts = served.prompts
    try:
        chat = prompts.build(ChatPrompt(tuple(MESSAGES))).tokens
    except InvalidRequest:
        chat = None
    return Meaning(engine.model, prompts.tokenize(TEXT), chat, set(engine.end_tokens))


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, b"\xff"])
def test_a_generation_config_that_says_nothing_is_left_out(
    content: str | bytes, folder: Path
) -> None:
    expected = of_mlx_lm(folder)
    put("generation_config.json", content)(folder)
    assert here(folder) == expected
