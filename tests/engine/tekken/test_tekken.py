"""Conversations in Mistral's own format, token for token as mistral-common renders them.

`references.json` has the tokens of mistral-common 1.13.1 (`make_references`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.engine.errors import ModelRejected
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.tokenizer import load_tokenizer
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.request import ChatPrompt
from backend.engine.settings import Settings
from tests.engine.tekken.tekken_file import CONVERSATIONS, VERSIONS, write_tekken

REFERENCES = json.loads((Path(__file__).parent / "references.json").read_text())


def _prompts(path: Path) -> PromptBuilder:
    (path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    checkpoint = Checkpoint(path, "it", {"model_type": "mistral"}, 0)
    return PromptBuilder(load_tokenizer(checkpoint, Settings()), 4096, 1 << 20)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptBuilder]:
    folders = {version: tmp_path_factory.mktemp(version) for version in VERSIONS}
    return {version: _prompts(write_tekken(path, version)) for version, path in folders.items()}


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (version, name)
        for version, written in REFERENCES.items()
        for name, tokens in written.items()
        if tokens is not None  # None: mistral-common refuses it
    ],
)
def test_it_renders_as_mistral_common_does(
    prompts: dict[str, PromptBuilder], version: str, name: str
) -> None:
    expected = REFERENCES[version][name]
    messages, tools = CONVERSATIONS[name]
    built = prompts[version].build(ChatPrompt(tuple(messages), tuple(tools)))
    written = prompts[version].detokenize(built.tokens)
    assert written == prompts[version].detokenize(expected)
    assert list(built.tokens) == expected


def test_a_file_that_does_not_name_its_special_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRejected, match=r"put the tokenizer\.json of the same model into"):
        _prompts(write_tekken(tmp_path, "v3", named=False))
