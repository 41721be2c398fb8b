"""PEFT adapters on embedding models: the vectors are those of weights to which they were added."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.load_request import AdapterRequest
from backend.engine.loading.adapters import CONFIG, WEIGHTS
from backend.engine.loading.peft import WEIGHTS as PEFT_WEIGHTS
from tests.engine.embedding import rotary_checkpoints as rotary
from tests.engine.embedding import tiny_checkpoints as tiny
from tests.engine.embedding.engine_calls import embed, serving
from tests.engine.embedding.tiny_checkpoints import HIDDEN, TEXTS, WIDE

RANK, ALPHA, SCALE = 4, 2.0, 0.5
# Family → the checkpoint's name of a layer.
LAYERS = {
    "bert": "encoder.layer.1.attention.self.query",
    "mpnet": "encoder.layer.1.attention.attn.k",
    "distilbert": "distilbert.transformer.layer.0.ffn.lin1",
    "qwen2": "layers.1.self_attn.q_proj",
}


def write_adapter(folder: Path, layer: str, outputs: int) -> np.ndarray:
    """Write an adapter of a layer; returns what it adds to the weight at a scale of 1."""
    folder.mkdir()
    drawn = np.random.RandomState(5)
    first = drawn.standard_normal((RANK, HIDDEN)).astype(np.float32)
    second = drawn.standard_normal((outputs, RANK)).astype(np.float32)
    name = f"base_model.model.{layer}.lora_"
    save_file({f"{name}A.weight": first, f"{name}B.weight": second}, folder / PEFT_WEIGHTS)
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(stated))
    product: np.ndarray = second @ first * (ALPHA / RANK)
    return product


async def vectors(folder: Path, *adapters: AdapterRequest) -> np.ndarray:
    async with serving(folder, adapters=adapters) as engine:
        return np.array([(await embed(engine, text)).values for text in TEXTS])


@pytest.mark.parametrize("family", LAYERS)
async def test_an_adapter_is_added(family: str, tmp_path: Path) -> None:
    folder, layer = tiny.write(family, tmp_path / "base"), LAYERS[family]
    weights = load_file(folder / "model.safetensors")
    weight = f"{layer}.weight"
    change = write_adapter(tmp_path / "adapter", layer, weights[weight].shape[0])
    merged = shutil.copytree(folder, tmp_path / "merged")
    save_file(weights | {weight: weights[weight] + SCALE * change}, merged / "model.safetensors")
    found = await vectors(folder, AdapterRequest(str(tmp_path / "adapter"), SCALE))
    np.testing.assert_allclose(found, await vectors(merged), atol=2e-5)
    assert np.abs(found - await vectors(folder)).max() > 0.01


async def test_an_adapter_of_a_joined_matrix_is_divided(tmp_path: Path) -> None:
    folder, layer = tiny.write("modernbert", tmp_path / "base"), "layers.1.attn.Wqkv"
    change = write_adapter(tmp_path / "adapter", layer, 3 * HIDDEN)
    weights = load_file(folder / "model.safetensors")
    merged = shutil.copytree(folder, tmp_path / "merged")
    weights[f"{layer}.weight"] += SCALE * change
    save_file(weights, merged / "model.safetensors")
    found = await vectors(folder, AdapterRequest(str(tmp_path / "adapter"), SCALE))
    np.testing.assert_allclose(found, await vectors(merged), atol=2e-5)
    assert np.abs(found - await vectors(folder)).max() > 0.01


async def test_weights_are_replaced_under_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    folder, adapter = tiny.write("mpnet", tmp_path / "base"), tmp_path / "adapter"
    name, replaced = "embeddings.LayerNorm", np.linspace(0.5, 2, HIDDEN, dtype=np.float32)
    change = write_adapter(adapter, LAYERS["mpnet"], HIDDEN)
    held = load_file(adapter / PEFT_WEIGHTS)
    held[f"base_model.model.{name}.modules_to_save.weight"] = replaced
    save_file(held, adapter / PEFT_WEIGHTS)
    weights = load_file(folder / "model.safetensors")
    weights[f"{LAYERS['mpnet']}.weight"] += change
    merged = shutil.copytree(folder, tmp_path / "merged")
    save_file(weights | {f"{name}.weight": replaced}, merged / "model.safetensors")
    found = await vectors(folder, AdapterRequest(str(adapter)))
    np.testing.assert_allclose(found, await vectors(merged), atol=2e-5)


async def test_a_pooler_that_is_not_served_is_left_out(tmp_path: Path) -> None:
    """PEFT adapts all layers of a name, and saves all biases if it trains them."""
    folder, adapter = tiny.write("bert", tmp_path / "base"), tmp_path / "adapter"
    write_adapter(adapter, LAYERS["bert"], HIDDEN)
    wanted = await vectors(folder, AdapterRequest(str(adapter)))
    held = load_file(adapter / PEFT_WEIGHTS)
    write_adapter(tmp_path / "pooler", "pooler.dense", HIDDEN)
    held |= load_file(tmp_path / "pooler" / PEFT_WEIGHTS)
    held["base_model.model.pooler.dense.bias"] = np.ones(HIDDEN, np.float32)
    save_file(held, adapter / PEFT_WEIGHTS)
    np.testing.assert_array_equal(await vectors(folder, AdapterRequest(str(adapter))), wanted)


async def test_adapters_of_mlx_lm_are_refused_by_encoders(tmp_path: Path) -> None:
    folder, adapter = tiny.write("mpnet", tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / CONFIG).write_text(json.dumps({"lora_parameters": {"rank": 4, "scale": 1.0}}))
    parts = {"a.lora_a": np.zeros((HIDDEN, 4)), "a.lora_b": np.zeros((4, HIDDEN))}
    save_file({key: part.astype(np.float32) for key, part in parts.items()}, adapter / WEIGHTS)
    with pytest.raises(ModelRejected, match="the model has no layer 'a'"):
        await vectors(folder, AdapterRequest(str(adapter)))


async def test_magnitudes_are_not_added_to_the_adapter_of_a_task(tmp_path: Path) -> None:
    folder, adapter = rotary.write("jina_v3", tmp_path / "base"), tmp_path / "adapter"
    layer = "roberta.encoder.layers.0.mlp.fc1"
    write_adapter(adapter, layer, WIDE)
    held = load_file(adapter / PEFT_WEIGHTS)
    held[f"base_model.model.{layer}.lora_magnitude_vector"] = np.ones(WIDE, np.float32)
    save_file(held, adapter / PEFT_WEIGHTS)
    stated = json.loads((adapter / CONFIG).read_text()) | {"use_dora": True}
    (adapter / CONFIG).write_text(json.dumps(stated))
    assert (await vectors(folder, AdapterRequest(str(adapter)))).shape[1] == HIDDEN
    task, asked = {"task": "separation"}, (AdapterRequest(str(adapter)),)
    with pytest.raises(InvalidRequest, match="of the kind dora, which cannot be added to others"):
        async with serving(folder, adapters=asked, settings=task):
            pass
