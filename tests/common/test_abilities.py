"""The abilities of a model that is not loaded come from the files of its checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.abilities import abilities, text_only

MODELS = Path(__file__).parents[1] / "models"


def _checkpoint(
    folder: Path,
    config: dict[str, Any],
    template: str = "",
    added: tuple[str, ...] = (),
    tensors: tuple[str, ...] = (),
) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = [{"id": n, "content": text} for n, text in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {}}))
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny_text", ("completion", "tools", "thinking")),
        ("tiny_vision", ("completion", "tools", "vision", "thinking")),
        ("tiny_omni", ("completion", "tools", "vision", "audio", "thinking")),
    ],
)
def test_of_real_checkpoints(name: str, expected: tuple[str, ...]) -> None:
    assert abilities(MODELS / name) == expected
    blind = tuple(word for word in expected if word not in ("vision", "audio"))
    assert abilities(MODELS / name, "text") == blind
    assert text_only(MODELS / name) == ("vision" not in expected)
    assert text_only(MODELS / name, "text")


def test_of_a_model_without_a_chat_template(tmp_path: Path) -> None:
    folder = _checkpoint(
        tmp_path, {"model_type": "qwen2"}, added=("<|fim_prefix|>", "<|fim_suffix|>")
    )
    assert abilities(folder) == ("completion", "insert")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.json", '{"chat_template": "{{ x }} </think>"}'),
        ("processor_config.json", '{"chat_template": {"default": "{{ x }} </think>"}}'),
        ("tokenizer_config.json", '{"chat_template": {"default": "{{ x }} </think>"}}'),
        ("additional_chat_templates/default.jinja", "{{ x }} </think>"),
    ],
)
def test_a_template_is_found_in_every_file_of_templates(
    name: str, content: str, tmp_path: Path
) -> None:
    folder = _checkpoint(tmp_path, {"model_type": "qwen2"})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    assert abilities(folder) == ("completion", "tools", "thinking")


def test_a_text_model_that_keeps_the_configuration_of_its_whole_model(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}}
    weights = ("model.embed_tokens.weight",)
    assert abilities(_checkpoint(tmp_path, config, "{{ x }}", tensors=weights)) == (
        "completion",
        "tools",
    )


def test_of_other_kinds(tmp_path: Path) -> None:
    bert = {"model_type": "bert", "architectures": ["BertModel"]}
    assert abilities(_checkpoint(tmp_path, bert)) == ("embedding",)
    assert abilities(tmp_path, "rerank") == ()


def test_before_a_download_and_of_broken_files(tmp_path: Path) -> None:
    assert abilities(tmp_path / "none") == ("completion", "tools")
    assert abilities(tmp_path / "none", "embedding") == ("embedding",)
    (tmp_path / "config.json").write_text("[" * 10_000)
    assert abilities(tmp_path) == ("completion", "tools")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert abilities(tmp_path) == ("completion", "tools")


def test_a_checkpoint_whose_weights_are_not_all_known_is_not_called_blind(tmp_path: Path) -> None:
    assert not text_only(tmp_path / "none")
    _checkpoint(tmp_path, {"model_type": "llama"}, tensors=("model.norm.weight",))
    assert text_only(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    header = json.dumps({"model.norm.weight": {}}).encode()
    for shard in range(2):
        path = tmp_path / f"model-{shard}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert text_only(tmp_path) == (shard == 0)


def test_changed_weights_are_read_again_and_unchanged_ones_are_not(tmp_path: Path) -> None:
    _checkpoint(tmp_path, {"model_type": "llama"}, tensors=("model.norm.weight",))
    assert text_only(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    written = index.stat().st_mtime_ns
    index.write_text(json.dumps({"weight_map": {"vision_tower.norm.weight": "a"}}))
    os.utime(index, ns=(written, written))
    assert text_only(tmp_path)
    os.utime(index, ns=(written, written + 1))
    assert not text_only(tmp_path)
