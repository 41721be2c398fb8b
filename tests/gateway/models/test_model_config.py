"""Model files: which keys are used, which are refused; a bad file does not affect others."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.models.config import KEYS, ModelConfig
from gateway.models.reading import ModelFolder, read_folder
from gateway.supervisor.instance import load_request
from tests.gateway.doc_tables import tables

DOCS = Path(__file__).parents[3] / "docs" / "models.md"

BOMB = "a: &a [0, 0]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in pairwise("abcdefghij")
)
MERGES = "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in pairwise("abcdefghij")
)
# As LocalAI's importer and its users write them.
LOCALAI = """
name: qwen
description: imported
usage: see the gallery
backend: mlx
known_usecases: [chat]
context_size: 4096
f16: true
mmap: true
gpu_layers: 99
mirostat: 0
parameters:
  model: mlx-community/Qwen3-0.6B-4bit
  temperature: 1
  top_p: 0.95
  top_k: 20
  batch: 512
  logit_bias: {50256: -100}
function:
  grammar: {disable: true}
template:
  use_tokenizer_template: true
  chat: ""
options:
- tool_parser:hermes
- reasoning_parser:qwen3
reasoning: {disable: true}
stopwords: ["<|im_end|>"]
cache_type_k: q8_0
cache_type_v: q8_0
lora_adapters: [loras/one, loras/two]
lora_scales: [0.5]
n_draft: 4
"""


def folder_of(folder: Path, **files: str) -> ModelFolder:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return read_folder(folder)


def sentence_of(folder: Path, text: str) -> str:
    """The message with which a file is refused."""
    found = folder_of(folder, m=text)
    assert found.models == []
    return next(iter(found.broken.values()))


def test_a_file_of_localai_is_accepted(tmp_path: Path) -> None:
    found = folder_of(tmp_path, qwen=LOCALAI)
    assert found.broken == {}
    config = found.models[0]
    assert config.parameters.logit_bias == {"50256": -100}
    assert config.reasoning.disable is True
    request = load_request(config, tmp_path)
    assert request.Model == "mlx-community/Qwen3-0.6B-4bit"
    assert request.ModelPath == str(tmp_path)
    assert request.ContextSize == 4096
    assert list(request.Options) == [
        "n_draft:4",
        "tool_parser:hermes",
        "reasoning_parser:qwen3",
    ]
    assert request.CacheTypeKey == request.CacheTypeValue == "q8_0"
    assert list(request.LoraAdapters) == ["loras/one", "loras/two"]
    assert list(request.LoraScales) == [0.5]


def test_the_models_choice_in_a_request_is_added_to_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    text = "parameters: {model: m}\nlora_adapters: [a]\nadapters: {b: loras/b}\ndraft_model: small"
    config = folder_of(tmp_path, m=text + "\nengine_args: {parallel: 2}").models[0]
    plain = load_request(config, tmp_path)
    chosen = load_request(config, tmp_path, draft="owner/draft")
    assert list(plain.LoraAdapters) == list(chosen.LoraAdapters) == ["a"]
    assert list(chosen.Options) == ["adapters:b=loras/b"]
    assert plain.DraftModel == str(tmp_path / "small")
    assert chosen.DraftModel == "owner/draft"
    assert plain.EngineArgs == '{"parallel": 2}'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("parameters: {model: m, temprature: 1}", "did you mean 'temperature'?"),
        ("parameters: {model: m}\ncontext-sise: 1", "did you mean 'context_size'?"),
        ("parameters: {model: m}\nreasoning: {dissable: true}", "did you mean 'disable'?"),
        ("parameters: {}", "parameters.model is missing"),
        ("name: x", "parameters is missing"),
        ("model: m", "model belongs to the section parameters: write `parameters: {model: …}`"),
        ("parameters: {model: m}\ntop_p: 1", "write `parameters: {top_p: …}`"),
        ("parameters: {model: m, context_size: 9}", "context_size does not belong to the section"),
        ("parameters: {model: m}\ncontext_size: big", "context_size is 'big'"),
        ("parameters: {model: m, top_p: 2}", "parameters.top_p is 2"),
        ("parameters: {model: m, temperature: .nan}", "parameters.temperature is nan"),
        ("parameters: {model: m}\ntemplate: {chat: '{{.Input}}'}", "template.chat is not applied"),
        ("parameters: {model: m}\nsystem_prompt: hi", "system_prompt is not applied"),
        ("parameters: {model: m}\nbackend: llama-cpp", "backend is 'llama-cpp'"),
        ("parameters: {model: m}\naddress: nowhere", "address is 'nowhere'"),
        ("parameters: {model: m}\naddress: a:1\nbackend: /b", "backend and address"),
        ("parameters: {model: m}\naliases: [m]", "aliases has 'm'"),
        ("parameters: {model: m}\nparameters: {model: n}", "line 2, column 1: the key"),
        ("parameters: {model: m", "line 1, column"),
        ("? [a]\n: b", "line 1, column"),
        ("- a", "a model file is a map"),
        ("", "a model file is a map"),
        ("name: 3\nparameters: {model: m}", "name is 3"),
        ("!!python/object/apply:os.getpid []", "could not determine a constructor"),
        (BOMB, "its aliases expand to more than 100000 values"),
        ("a: &a {a: 1}\n" + MERGES, "its aliases expand to more than 100000 values"),
        ("&a [*a]", "its aliases expand to more than 100000 values"),
        ("[" * 5000, "is nested too deeply"),
        ("# " + "a" * 140_000, "has more than 131072 bytes"),
    ],
)
def test_a_bad_file_is_reported_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    reason = sentence_of(tmp_path, text)
    assert reason.startswith("m.yaml: ")
    assert sentence in reason
    assert "\n" not in reason


def test_a_bad_file_does_not_affect_the_others(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "folder.yaml").mkdir()
    found = folder_of(
        tmp_path,
        a="name: one\nparameters: {model: m}\naliases: [uno]",
        b="name: uno\nparameters: {model: m}",
        c="name: two\nparameters: {model: m}\naliases: [one]",
        d="name: asleep\ndisabled: true\nparameters: {model: m}",
        e="name: bad\nparameters: [",
        f="name: worse\nparameters: {}",
    )
    assert [model.name for model in found.models] == ["one"]
    assert found.broken == {
        "bytes": "bytes.yaml: is not UTF-8 text",
        "two": "c.yaml: the alias 'one' is in use by a.yaml: choose another",
        "e": found.broken["e"],
        "worse": "f.yaml: parameters.model is missing",
    }


def test_a_missing_folder_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="does not exist"):
        read_folder(tmp_path / "nowhere")


_WORDS = st.sampled_from(
    [*ModelConfig.model_fields, *KEYS.neutral, *KEYS.refused, "model", "disable", "chat", "<<"]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(_VALUES)
def test_any_file_is_a_model_or_a_message(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = folder_of(Path(folder), m=yaml.safe_dump(value))
    assert len(found.models) + len(found.broken) <= 1
    for sentence in found.broken.values():
        assert sentence.startswith("m.yaml: ")


def test_the_tables_in_the_docs_are_those_of_the_code() -> None:
    text = DOCS.read_text("utf-8")
    for name, table in tables().items():
        assert f"<!-- {name} -->\n{table}<!-- end of {name} -->" in text


def test_no_key_is_in_two_tables() -> None:
    assert not (KEYS.neutral.keys() & KEYS.refused.keys())
    assert not (ModelConfig.model_fields.keys() & (KEYS.neutral.keys() | KEYS.refused.keys()))
