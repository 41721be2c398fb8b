"""Checks a model directory before any weight is loaded.

Every reason why a directory is not a supported model has its own message. No check needs MLX, so
the checks can run before a download, on the thread for work on the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.engine.embedding.kind import require_family
from backend.engine.errors import Incomplete, Unusable, naming
from backend.engine.loading.architectures import (
    is_built,
    is_multimodal,
    model_types,
    unserved_speech,
    vlm_model_types,
)
from backend.engine.loading.folder import read_object, readable, require_regular_files
from backend.engine.loading.model_reference import GGUF
from backend.engine.loading.shards import read_shards, weight_files, weight_map
from backend.engine.settings import Settings
from backend.engine.vision.families import why_not_read, why_not_seen
from common.drafter_kind import DrafterKind, drafter_kind, drafter_name
from common.field_names import named
from common.media_parts import has_media
from common.model_kind import SPEECH_FAMILIES, ModelKind, kind_of, with_model_type
from common.wording import did_you_mean, shown

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.*.json",
    "tokenizer.model*",
    "*.tiktoken",
    "tekken.json",
    "*.model",
    "vocab.txt",
    "rwkv_vocab*.txt",
    "tokenizer*.jsonl",
)
# Tokenizers of bytes and characters, which need no vocabulary.
_WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_COUNTED = re.compile(r"(moe_)?(num|n)(_hidden|_local|_routed)?_(layers?|experts)|depth")
_MOST_PARTS = 4096  # layers, or experts
_MOST_TENSORS = 128  # maximum for one expert of a layer, with scales and biases
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)
_MOST_SIZE = (1 << 31) - 1  # largest dimension of an array in MLX


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory in which the checks of this module have found no fault."""

    path: Path
    name: str
    config: dict[str, Any]
    weights_bytes: int  # size of the weights in the files; a cast during the load may change it
    kind: ModelKind = ModelKind.TEXT  # the kind of requests that the model answers
    # Whether the model also accepts images or audio, and is loaded with encoders for them.
    media: bool = False
    drafter: DrafterKind | None = None  # the kind of drafter; None for a complete model
    missing: str = ""  # names of missing weight files, as a list for messages

    @property
    def of_vlm(self) -> bool:
        """Whether mlx-vlm builds the model: for its media, or because mlx-lm lacks its family."""
        unknown = self.config.get("model_type") not in model_types()
        return self.media or (unknown and not self.config.get("model_file"))


def inspect(path: Path, name: str, settings: Settings, *, drafts: bool = False) -> Checkpoint:
    """Do all checks that need no MLX. Raises ModelRejected.

    drafts: whether the checkpoint may be a drafter.
    """
    with naming(name), readable(path):
        files = frozenset(entry.name for entry in path.iterdir())
        require_files(files)
        require_regular_files(path)
        config = inspect_config(path, settings, drafts=drafts)
        shards = read_shards(path)
        drafter = drafter_kind(config)
        kind = ModelKind.TEXT if drafter else _kind(config, files, settings)
        # A model that generates text may not need the contents of a missing file.
        if shards.missing and (drafter or kind is not ModelKind.TEXT):
            raise missing_files(shards.missing)
        _require_buildable(config, len(shards.tensors))
        if drafter:
            return Checkpoint(path, name, config, shards.bytes, drafter=drafter)
        media = kind is ModelKind.TEXT and _accepts_media(config, shards.tensors, settings)
        if kind is ModelKind.TEXT and not media and not config.get("model_file"):
            _require_text_family(config["model_type"])
        if config["model_type"] != "parakeet":  # its vocabulary is in config.json
            _require_tokenizer(path)
        return Checkpoint(path, name, config, shards.bytes, kind, media, missing=shards.missing)


def inspect_config(path: Path, settings: Settings, *, drafts: bool = False) -> dict[str, Any]:
    """Check config.json, and return its contents. Raises ModelRejected, Unusable.

    drafts: whether the checkpoint may be a drafter.
    """
    files = frozenset(entry.name for entry in path.iterdir())
    config = with_model_type(read_object(path / "config.json"))
    model_type = config.get("model_type")
    if drafts and drafter_kind(config):
        return config
    _refuse_drafter(config, drafts=drafts)
    if not isinstance(model_type, str) or not model_type:
        raise Unusable("config.json names no model_type")
    if code := config.get("model_file"):
        if not settings.trust_remote_code:
            raise Unusable(
                f"it brings its own Python code ({shown(code)}), which is not run unless the"
                " host sets trust_remote_code; do so only if you trust its author",
            )
        if Path(str(code)).name != code or code not in files:
            raise Unusable(f"its code file {shown(code)} is not in its folder")
        return config
    kind = _kind(config, files, settings)
    if kind is not ModelKind.TEXT:
        require_family(kind, config)
        return config
    if unserved_speech(model_type):
        raise Unusable(
            f"it is a speech-to-text model of a family that is not served ({shown(model_type)}):"
            f" load one of {SPEECH_FAMILIES}"
        )
    if config.get("is_encoder_decoder") and model_type not in model_types():
        raise Unusable(
            "it is an encoder-decoder model, which is not supported: load a decoder-only model"
        )
    tensors = frozenset(weight_map(path))
    if not tensors and is_multimodal(config) and settings.type != "text":
        why = why_not_seen(config)
        if not why:
            return config
        if model_type not in model_types():
            raise Unusable(why)
    if not _accepts_media(config, tensors, settings):
        _require_text_family(model_type)
    return config


def _refuse_drafter(config: dict[str, Any], *, drafts: bool) -> None:
    """Refuse a drafter (EAGLE-3, DFlash) of an unsupported kind, or where a model is expected."""
    drafter = drafter_name(config)
    if not drafter:
        return
    known = " or ".join(kind.value for kind in DrafterKind)
    rest = (
        f"and this version does not support its kind: name a drafter of another kind ({known}) or a"
        " smaller model of the same family, or draft with the model's own head (option mtp) or with"
        " prompt_lookup"
        if drafts or not drafter_kind(config)
        else (
            f"so name the model that it was trained for, and set {named('DraftModel')} to this"
            " drafter"
        )
    )
    raise Unusable(f"it is a drafter ({shown(drafter)}), not a complete model, {rest}")


def _require_buildable(config: dict[str, Any], tensors: int) -> None:
    """Refuse impossible sizes, too many layers or experts, and more tensors than layers can have.

    Each layer takes time to build, and each tensor takes time to read.
    """
    layers, experts = 0, 0
    for part in _parts(config):
        for key, count in part.items():
            if key in _SIZES and isinstance(count, int) and not 0 <= count <= _MOST_SIZE:
                raise Unusable(
                    f"{key} is {shown(count)} in config.json, which cannot be the size of an array",
                )
            if not (isinstance(count, int) and _COUNTED.fullmatch(key)):
                continue
            if count > _MOST_PARTS:
                raise Unusable(
                    f"{key} is {shown(count)} in config.json, but at most {_MOST_PARTS} are built",
                )
            if key.endswith("experts"):
                experts = max(experts, count)
            else:
                layers += max(count, 0)
    most = _MOST_TENSORS * (1 + layers * (1 + experts))
    if layers and tensors > most:
        raise Unusable(
            f"its weights are {tensors} tensors, and a model of the {layers} layers in config.json"
            f" has at most {most}",
        )


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _require_text_family(model_type: str) -> None:
    if not is_built(model_type):
        known = model_types() | vlm_model_types()
        raise Unusable(
            f"its model type {shown(model_type)} is unknown to this version of mlx-lm"
            f"{did_you_mean(model_type, known)}",
        )
    if why := why_not_read(model_type):
        raise Unusable(why)


def _kind(config: dict[str, Any], files: frozenset[str], settings: Settings) -> ModelKind:
    return kind_of(config, files, "text" if settings.type == "vision" else settings.type)


def require_files(files: frozenset[str]) -> None:
    """Refuse a folder or a repository by the names of its files. Raises Unusable."""
    names = [file.lower() for file in files]
    weights = bool(weight_files(files))
    if not files:
        raise Incomplete("the folder is empty")
    if not weights and any(file.endswith(".gguf") for file in names):
        raise Unusable(GGUF)
    if "adapter_config.json" in files and "config.json" not in files:
        raise Unusable("it is a LoRA adapter, not a model: name the model it was made for")
    if "config.json" not in files and "modules.json" in files:
        if any(file.startswith("0_Transformer") for file in files):
            raise Unusable(
                "its Transformer is in the folder 0_Transformer: move the folder's files beside"
                ' modules.json, and change its path in modules.json to ""'
            )
        raise Unusable(
            "it has no config.json, because its first step in modules.json is not a Transformer"
            " (but CLIPModel, Router, WordEmbeddings or others), which is not supported; for static"
            ' embeddings, add a config.json with {"model_type": "model2vec"} to its folder'
        )
    if "config.json" not in files:
        raise Incomplete("the folder has no config.json, so it is not a model directory")
    if weights:
        return
    if any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in names):
        raise Unusable(
            "its weights are PyTorch files: convert it with mlx_lm.convert, or find a version with"
            " safetensors files",
        )
    if any(file.endswith(".npz") for file in names):
        raise Unusable("its weights are an .npz file: find a version with safetensors files")
    raise Incomplete("the folder has no weights (model*.safetensors)")


def missing_files(files: str) -> Incomplete:
    """Return the error for missing weight files."""
    return Incomplete(f"weight files are missing ({files}): download it again")


def _accepts_media(config: dict[str, Any], tensors: frozenset[str], settings: Settings) -> bool:
    """Return whether the model is served with its vision and audio parts. Raises ModelRejected.

    A model that was converted to a text model still has the configuration of the whole model, so
    only the weights show which parts exist. Some configurations do not name the vision part at all
    (Molmo, Phi-3.5 Vision); for a family that mlx-lm does not have, the weights alone decide.
    """
    wanted = settings.type == "vision"
    designed = is_multimodal(config) or config["model_type"] not in model_types()
    if settings.type == "text" or config.get("model_file"):
        return False
    if not wanted and not (designed and has_media(tensors)):
        return False
    if wanted and tensors and not has_media(tensors):
        raise Unusable("type is vision, but its weights have no vision or audio part")
    if why := why_not_seen(config):
        text_part = config["model_type"] in model_types()
        hint = "; to serve its text part alone, set the option type:text" if text_part else ""
        raise Unusable(f"{why}{hint}")
    return True


def _require_tokenizer(path: Path) -> None:
    if any(True for pattern in _TOKENIZER_FILES for _ in path.glob(pattern)):
        return
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return
    stated = path / "tokenizer_config.json"
    if stated.is_file() and read_object(stated).get("tokenizer_class") in _WITHOUT_FILES:
        return
    raise Incomplete(
        "its tokenizer is missing: the folder has no tokenizer.json, tokenizer.model or other"
        " vocabulary file"
    )
