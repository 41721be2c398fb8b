"""Quantised checkpoints whose weights become dense at load."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models import mla, switch_layers
from mlx_lm.utils import dequantize_model

from backend.engine.device import Device
from backend.engine.loading import weights
from backend.engine.loading.checkpoint import inspect
from backend.engine.loading.dense import dense_growth, make_dense, quantized_layers
from backend.engine.loading.weights import LoadedModel, load_model
from backend.engine.settings import Settings
from backend.engine.units import GIB
from tests.engine.loading_models import write_model
from tests.engine.loads import at_once

CPU = Device("cpu", "a CPU", 64 * GIB, 64 * GIB)
METAL = Device("metal", "an Apple GPU", 64 * GIB, 64 * GIB)
TOKENS = mx.array([[5, 6, 7, 200, 9]])
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="session", params=["plain", "experts"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = EXPERTS if request.param == "experts" else {}
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_model(folder, bits=4, dtype="float16", **config)


def load(path: Path, device: Device = CPU, **settings: Any) -> LoadedModel:
    chosen = Settings(**settings)
    return at_once(load_model(inspect(path, "m", chosen), chosen, device))


def test_a_cpu_gives_the_results_of_the_dequantised_checkpoint(quantised: Path) -> None:
    loaded = load(quantised)
    kept = load(quantised, METAL, dtype="float32")
    assert quantized_layers(kept.model)
    assert not quantized_layers(loaded.model)
    assert not any("scales" in layer for layer in loaded.model.modules())
    logits = loaded.model(TOKENS)
    assert mx.allclose(logits, kept.model(TOKENS), atol=1e-4)
    assert mx.array_equal(logits, dequantize_model(kept.model)(TOKENS))


def test_sizes_are_those_of_the_dense_weights(quantised: Path) -> None:
    loaded, kept = load(quantised), load(quantised, dequantize=False)
    held = weights._parameters(loaded.model)
    assert {array.dtype for array in held} == {mx.float32}
    assert loaded.weights_bytes == sum(array.nbytes for array in held) > 3 * kept.weights_bytes
    layers = quantized_layers(kept.model)
    assert kept.weights_bytes + dense_growth(layers, mx.float32) == loaded.weights_bytes


def test_kv_of_dense_and_quantised_weights_is_kept_apart(quantised: Path) -> None:
    loaded, kept = load(quantised), load(quantised, dequantize=False)
    assert (loaded.arithmetic, kept.arithmetic) == ("float32, dequantised", "float32")


@pytest.mark.parametrize(
    ("device", "settings", "dense"),
    [
        (CPU, {"dequantize": False}, False),
        (CPU, {"dtype": "float16"}, False),
        (CPU, {"dtype": "float16", "dequantize": True}, True),
        (METAL, {}, False),
        (METAL, {"dequantize": True}, True),
    ],
)
def test_the_device_decides_unless_the_option_is_set(
    quantised: Path, device: Device, settings: dict[str, Any], dense: bool
) -> None:
    loaded = load(quantised, device, **settings)
    kinds = {type(loaded.model.layers[0].self_attn.q_proj), type(loaded.model.model.embed_tokens)}
    assert kinds == ({Linear, Embedding} if dense else {QuantizedLinear, QuantizedEmbedding})
    assert loaded.dequantized == dense


def test_too_little_memory_keeps_them_quantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write_model(tmp_path / "m", bits=4, hidden_size=256, num_hidden_layers=8)
    loaded = load(path, memory_limit_mib=3)
    assert isinstance(loaded.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert not loaded.dequantized
    (line,) = [record.message for record in caplog.records if "quantised" in record.message]
    assert "model 'm' stays quantised: dense weights need 4 MiB, " in line


def test_dense_checkpoints_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loaded = load(write_model(tmp_path / "m"), memory_limit_mib=3, dequantize=True)
    assert not loaded.dequantized
    assert "quantised" not in caplog.text


def test_packed_and_dense_weights_are_never_both_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m", bits=8, hidden_size=256, num_hidden_layers=8)
    monkeypatch.setattr(weights, "_SLICE_BYTES", 1 << 18)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(path)
    assert mx.get_peak_memory() - before < 1.2 * loaded.weights_bytes
    assert mx.get_active_memory() - before < 1.05 * loaded.weights_bytes


class Layers(Module):
    """One layer of each kind, and one layer that is used in two places."""

    def __init__(self, switch: Any, multi: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        mx.random.seed(3)
        self.linear = Linear(64, 32)
        self.embedding = Embedding(10, 64)
        self.experts = switch(64, 32, 4, bias=True)
        self.experts.bias = mx.random.normal((4, 32))
        self.heads = multi(64, 32, 2)
        self.listed = [Linear(64, 32, bias=False), {"deep": Linear(64, 64, bias=False)}]
        for holder, key in (
            *((self, name) for name in ("linear", "embedding", "experts", "heads")),
            (self.listed, 0),
            (self.listed[1], "deep"),
        ):
            holder[key] = holder[key].to_quantized(group_size=32, bits=4)  # type: ignore[index]
        self.again = self.linear

    def outputs(self) -> list[mx.array]:
        x = mx.arange(128).reshape(2, 64) / 64
        expert = mx.array([[0, 3], [2, 1]])
        return [
            self.linear(x),
            self.embedding(mx.array([1, 9])),
            self.embedding.as_linear(x),
            self.experts(x[:, None, None], expert),
            self.heads(x[None]),
            self.heads(self.heads(x[None]), transpose=False),
            self.listed[0](x),  # type: ignore[operator]
            self.listed[1]["deep"](x),
        ]


@pytest.mark.parametrize("package", ["mlx_lm", "mlx_vlm"])
def test_every_kind_of_layer_is_converted(package: str) -> None:
    switch, multi = switch_layers.SwitchLinear, mla.MultiLinear
    if package == "mlx_vlm":
        import mlx_vlm.models.mla
        import mlx_vlm.models.switch_layers

        switch = mlx_vlm.models.switch_layers.SwitchLinear
        multi = mlx_vlm.models.mla.MultiLinear
    model = Layers(switch, multi)
    expected = model.outputs()
    make_dense(model, quantized_layers(model), mx.float32)
    assert not quantized_layers(model)
    assert type(model.experts) is switch
    assert model.again is model.linear
    for before, after in zip(expected, model.outputs(), strict=True):
        assert mx.allclose(before, after, atol=1e-4)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
def test_every_kind_of_quantisation_is_converted(mode: str) -> None:
    holder = Module()
    holder.layer = Linear(64, 32)
    x = mx.arange(128).reshape(2, 64) / 64
    holder.layer = holder.layer.to_quantized(mode=mode)
    expected = holder.layer(x)
    make_dense(holder, quantized_layers(holder), mx.float32)
    assert holder.layer.weight.dtype == mx.float32
    assert mx.allclose(expected, holder.layer(x), atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_experts_with_a_scale_each_are_converted(dtype: mx.Dtype) -> None:
    """MLX computes with such layers on a GPU alone."""
    holder = Module()
    experts = switch_layers.SwitchLinear(64, 32, 4, bias=False)
    experts.weight *= mx.array([1.0, 9, 0.2, 3])[:, None, None]
    x, expert = mx.random.normal((2, 1, 1, 64)), mx.array([[0, 3], [2, 1]])
    expected = experts(x, expert)
    holder.layer = experts.to_quantized(group_size=16, mode="nvfp4", global_scale=True)
    before = sum(array.nbytes for array in weights._parameters(holder))
    layers = quantized_layers(holder)
    growth = dense_growth(layers, dtype)
    make_dense(holder, layers, dtype)
    assert holder.layer.weight.dtype == dtype
    assert holder.layer.weight.nbytes == before + growth
    # On a CPU, MLX multiplies experts only in float32.
    holder.layer.weight = holder.layer.weight.astype(mx.float32)
    far = mx.abs(holder.layer(x, expert) - expected).max(axis=(-1, -2))
    assert (far < 0.3 * mx.abs(expected).max(axis=(-1, -2))).all().item()


def test_a_layer_of_another_class_is_not_converted() -> None:
    class Own(QuantizedLinear):
        pass

    holder = Module()
    holder.layer = Own(64, 32)
    assert quantized_layers(holder) == {}
