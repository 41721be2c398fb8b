"""The text part of jina-embeddings-v4, whose adapters are in one file for all tasks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backend.engine.embedding.readers import TextReader
from backend.engine.errors import InvalidRequest, ModelRejected
from tests.engine.embedding import jina_v4_checkpoint
from tests.engine.embedding.engine_calls import embed, serving
from tests.engine.embedding.tiny_checkpoints import TEXTS

SAID: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_references.json").read_text())


@pytest.mark.parametrize("task", jina_v4_checkpoint.TASKS[:2])
async def test_vectors_equal_the_references(task: str, tmp_path: Path) -> None:
    folder = jina_v4_checkpoint.write(tmp_path)
    async with serving(folder, settings={"task": task}) as engine:
        reader = engine.reader(TextReader)
        rows = [reader.read_text(text)[0] for text in TEXTS]
        alone = [(await embed(engine, text)).values for text in TEXTS]
        together = (await engine.encode(lambda: rows)).outputs
        beside = await asyncio.gather(*(embed(engine, text) for text in TEXTS))
        assert reader.limits.context == 512  # the tokenizer's model_max_length
    np.testing.assert_allclose(alone, SAID[f"jina_v4 {task}"], atol=1e-5)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose([one.values for one in beside], alone, atol=1e-5)


async def test_earlier_names_of_the_weights_mean_the_same(tmp_path: Path) -> None:
    """Those of Qwen2.5-VL before its parts were below one `model`."""
    folder = jina_v4_checkpoint.write(tmp_path)
    weights = load_file(folder / "model.safetensors")
    named = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for name, value in weights.items()
    }
    assert named.keys() != weights.keys()
    save_file(named, folder / "model.safetensors")
    async with serving(folder, settings={"task": "retrieval"}) as engine:
        found = [(await embed(engine, text)).values for text in TEXTS]
    np.testing.assert_allclose(found, SAID["jina_v4 retrieval"], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "task is empty, but the model needs one of 'retrieval', 'text-matching', 'code'"),
        ({"task": "separation"}, "task is 'separation', but the model's tasks are 'retrieval', "),
    ],
)
async def test_it_is_not_loaded_without_one_of_its_tasks(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        async with serving(jina_v4_checkpoint.write(tmp_path), settings=options):
            pass


async def test_adapters_with_other_names_are_refused(tmp_path: Path) -> None:
    folder = jina_v4_checkpoint.write(tmp_path, task_names=["other"])
    with pytest.raises(
        ModelRejected, match=r"'other' cannot be applied: .* has no weights of a LoRA"
    ):
        async with serving(folder, settings={"task": "other"}):
            pass


async def test_another_pooling_is_refused(tmp_path: Path) -> None:
    folder = jina_v4_checkpoint.write(tmp_path, single_vector_pool_strategy="last_token")
    with pytest.raises(ModelRejected, match="its single_vector_pool_strategy is 'last_token'"):
        async with serving(folder, settings={"task": "code"}):
            pass
