"""Changes to the folder of a small checkpoint, as folders of people differ from one another."""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from tests.engine.loading_models import SPECIAL_TOKENS, read_weights, write_model, write_weights

# Changes a folder; returns the folder to load, or None for the same.
Change = Callable[[Path], "Path | None"]

BOM = b"\xef\xbb\xbf"
INDEX = "model.safetensors.index.json"


def put(name: str, content: bytes | str | dict[str, Any] | list[Any]) -> Change:
    """Write a file: text, bytes, or an object as JSON."""

    def change(path: Path) -> None:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content))

    return change


def edit(name: str, **values: Any) -> Change:
    """Set values of a JSON file."""
    return lambda path: put(name, read_json(path, name) | values)(path)


def config(**values: Any) -> Change:
    return edit("config.json", **values)


def tokens(**values: Any) -> Change:
    return edit("tokenizer_config.json", **values)


def without(name: str, *keys: str) -> Change:
    """Remove keys of a JSON file, or the file itself."""

    def change(path: Path) -> None:
        if not keys:
            (path / name).unlink()
            return
        put(name, {key: v for key, v in read_json(path, name).items() if key not in keys})(path)

    return change


def before(name: str, content: bytes) -> Change:
    """Put bytes at the beginning of a file."""
    return lambda path: put(name, content + (path / name).read_bytes())(path)


def all_of(*changes: Change) -> Change:
    def change(path: Path) -> Path | None:
        found = None
        for one in changes:
            found = one(found or path) or found
        return found

    return change


def weights(**added: mx.array) -> Change:
    """Add tensors; a name's dots are written as two underscores."""

    def change(path: Path) -> None:
        more = {name.replace("__", "."): array for name, array in added.items()}
        write_weights(path, read_weights(path) | more)

    return change


def renamed(names: Callable[[str], str]) -> Change:
    def change(path: Path) -> None:
        write_weights(path, {names(name): array for name, array in read_weights(path).items()})

    return change


def files(*names: str, index: Any = None) -> Change:
    """Divide the weights among files with these names; index: which of them it names."""

    def change(path: Path) -> None:
        held = read_weights(path)
        (path / "model.safetensors").unlink()
        parts = {file: sorted(held)[at :: len(names)] for at, file in enumerate(names)}
        for file, part in parts.items():
            mx.save_safetensors(str(path / file), {name: held[name] for name in part})
        if index is not None:
            put(INDEX, index)(path)

    return change


def fifo(name: str) -> Change:
    def change(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(path / name)

    return change


def hole(name: str, size: int) -> Change:
    """A large file that takes no room."""

    def change(path: Path) -> None:
        with (path / name).open("wb") as file:
            file.truncate(size)

    return change


def link(name: str, target: str) -> Change:
    return lambda path: (path / name).symlink_to(target)


def snapshot(path: Path) -> Path:
    """The layout of the hub's cache: links to blobs with hashes for names."""
    blobs, folder = path / "blobs", path / "snapshots" / ("0" * 40)
    blobs.mkdir()
    folder.mkdir(parents=True)
    for at, file in enumerate([one for one in path.iterdir() if one.is_file()]):
        blob = file.rename(blobs / f"{at:064x}")
        (folder / file.name).symlink_to(Path("../../blobs") / blob.name)
    return folder


def linked_folder(path: Path) -> Path:
    shown = path.with_name("link")
    shown.symlink_to(path)
    return shown


def untied(path: Path) -> None:
    held = read_weights(path)
    write_weights(path, held | {"lm_head.weight": held["model.embed_tokens.weight"] * 2})
    config(tie_word_embeddings=False)(path)


def padded_header(path: Path) -> None:
    """A header that ends in spaces, with metadata that no library reads."""
    content = (path / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = {"format": "pt", "note": "x" * 5000}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + 4096)
    put("model.safetensors", struct.pack("<Q", len(text)) + text + content[8 + size :])(path)


def added_in_config(**fields: Any) -> Change:
    """The special tokens once more, in the tokenizer's configuration."""
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | fields
    found = {str(at): token | {"content": text} for at, text in enumerate(SPECIAL_TOKENS)}
    return tokens(added_tokens_decoder=found)


def quantised(**values: Any) -> Change:
    def change(path: Path) -> None:
        write_model(path, dtype="float32", bits=4)
        config(**values)(path)

    return change


def quantised_by_layer(
    mode: str, group_size: int, bits: int, **layers: dict[str, Any] | bool
) -> Change:
    """Quantise in a mode; `layers` have settings of their own, with two underscores for dots."""
    own = {name.replace("__", "."): settings for name, settings in layers.items()}

    def settings(path: str, layer: Any) -> dict[str, Any] | bool:
        return own.get(path, hasattr(layer, "to_quantized"))

    def change(path: Path) -> None:
        found = read_json(path, "config.json")
        module = importlib.import_module(f"mlx_lm.models.{found['model_type']}")
        model = module.Model(module.ModelArgs.from_dict(found))
        model.load_weights(list(read_weights(path).items()))
        quantize(model, group_size, bits, mode=mode, class_predicate=settings)
        write_weights(path, dict(tree_flatten(model.parameters())))
        stated = {"group_size": group_size, "bits": bits, "mode": mode}
        config(quantization=stated | own)(path)

    return change


def of_type(model_type: str, **values: Any) -> Change:
    def change(path: Path) -> None:
        write_model(path, dtype="float32", model_type=model_type, **values)

    return change


def read_json(path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / name).read_bytes())
    return found
