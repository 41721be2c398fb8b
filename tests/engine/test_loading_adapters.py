"""Adapters in mlx-lm's and PEFT's formats, compared with the same change made by hand."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_unflatten

from backend.engine.device import Device
from backend.engine.engine import Engine
from backend.engine.errors import EngineError, InvalidRequest, ModelNotFound, ModelRejected
from backend.engine.events import TextDelta
from backend.engine.load_request import AdapterRequest, LoadRequest
from backend.engine.loading import hub_process, peft
from backend.engine.loading.adapters import (
    CONFIG,
    WEIGHTS,
    Adapter,
    adapters_digest,
    find_adapters,
)
from backend.engine.loading.checkpoint import inspect
from backend.engine.loading.model_reference import HubModel
from backend.engine.loading.weights import LoadedModel, load_model
from backend.engine.request import GenerationRequest, RawPrompt, Sampling
from backend.engine.settings import Settings
from backend.engine.units import GIB
from tests.engine.loading_models import read_weights, write_model, write_weights
from tests.engine.loads import at_once

CPU = Device("cpu", "a CPU", 64 * GIB, 64 * GIB)
METAL = Device("metal", "an Apple GPU", 64 * GIB, 64 * GIB)
TOKENS = mx.array([[5, 6, 7, 200, 9]])
RANK = 4
SCALE = 8.0

ATTENTION = "model.layers.1.self_attn.q_proj"
MLP = "model.layers.0.mlp.down_proj"
EMBEDDING = "model.embed_tokens"
EXPERTS = "model.layers.1.mlp.switch_mlp.up_proj"
# What an adapter needs to know of a layer: inputs and outputs, number of experts first.
SIZES = {
    ATTENTION: (64, 64),
    MLP: (128, 64),
    EMBEDDING: (259, 64),
    EXPERTS: (4, 64, 32),
    "lm_head": (64, 259),
    "model.h.0.attn.c_attn": (64, 192),
}

Weights = dict[str, mx.array]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense", dtype="float32")


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "quantised", bits=4, dtype="float32")


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("models") / "experts",
        dtype="float32",
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )


def random_weights(seed: int, *layers: str, rank: int = RANK) -> Weights:
    keys = iter(mx.random.split(mx.random.key(seed), 2 * len(layers)))
    weights: Weights = {}
    for layer in layers:
        *count, inputs, outputs = SIZES[layer]
        shapes = ((inputs, rank), (rank, outputs))
        if count:
            shapes = (*count, rank, inputs), (*count, outputs, rank)  # type: ignore[assignment]
        for name, shape in zip(("lora_a", "lora_b"), shapes, strict=True):
            weights[f"{layer}.{name}"] = 0.05 * mx.random.normal(shape, key=next(keys))
    return weights


def write_adapter(folder: Path, weights: Weights, kind: str = "lora", **parameters: Any) -> Path:
    folder.mkdir(parents=True)
    config = {
        "fine_tune_type": kind,
        "num_layers": 2,
        "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.1} | parameters,
    }
    (folder / CONFIG).write_text(json.dumps(config))
    mx.save_safetensors(str(folder / WEIGHTS), weights)
    return folder


_PEFT_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_OF_EMBEDDINGS = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}


def write_peft(folder: Path, weights: Weights, outer: str = "", **stated: Any) -> Path:
    """Write an adapter of mlx-lm's form as PEFT does. outer: replaces `model.` in the names."""
    folder.mkdir(parents=True)
    named = {}
    for name, value in weights.items():
        layer, _, part = name.replace("lora_B.", "lora_B/").rpartition(".")
        part = part.replace("/", ".")
        parts = _OF_EMBEDDINGS if layer == EMBEDDING else _PEFT_NAMES
        layer = layer.replace("model.", outer, 1) if outer else layer
        named[f"base_model.model.{layer}.{parts.get(part, part)}"] = value.T
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none"} | stated
    (folder / CONFIG).write_text(json.dumps(config))
    mx.save_safetensors(str(folder / peft.WEIGHTS), named)
    return folder


def find(
    *wanted: tuple[Path | str, float] | Path | str, root: Path | str = ""
) -> tuple[Adapter, ...]:
    requests = [
        AdapterRequest(str(one[0]), one[1]) if isinstance(one, tuple) else AdapterRequest(str(one))
        for one in wanted
    ]
    return find_adapters(requests, str(root), threading.Event())


def load(model: Path, *adapters: Adapter, device: Device = CPU, **settings: Any) -> LoadedModel:
    chosen = Settings(**settings)
    return at_once(load_model(inspect(model, "m", chosen), chosen, device, adapters=adapters))


def with_change(model: Path, weights: Weights, scale: float, **settings: Any) -> Any:
    """The model with W + scale · (A B)ᵀ in place of the weights that an adapter names."""
    loaded = load(model, **settings).model
    modules = dict(loaded.named_modules())
    for layer in {name.rpartition(".")[0] for name in weights}:
        first, second = weights[f"{layer}.lora_a"], weights[f"{layer}.lora_b"]
        base = modules[layer]
        weight = base.weight
        if "scales" in base:
            weight = mx.dequantize(
                base.weight, base.scales, base.biases, group_size=base.group_size, bits=base.bits
            )
            replaced = Linear(weight.shape[1], weight.shape[0], bias=False)
            loaded.update_modules(tree_unflatten([(layer, replaced)]))
            base = replaced
        if layer == EMBEDDING:
            change = first @ second
        else:
            change = second @ first if first.ndim == 3 else (first @ second).T
        base.weight = weight + scale * change
    return loaded


def with_head_of(model: Path, changed: Any) -> mx.array:
    """The logits of a changed model with the tied head of the unchanged model, as PEFT has it."""
    logits: mx.array = load(model, dequantize=False).model.model.embed_tokens.as_linear(
        changed.model(TOKENS)
    )
    return logits


def same(left: Any, right: Any, within: float = 1e-4) -> bool:
    return bool(mx.allclose(left(TOKENS), right(TOKENS), atol=within).item())


@pytest.mark.parametrize(
    ("base", "layers", "settings"),
    [
        ("dense", (ATTENTION, MLP), {}),
        ("dense", (EMBEDDING,), {}),
        ("quantised", (ATTENTION, MLP), {"dequantize": False}),
        ("quantised", (ATTENTION, MLP), {"dequantize": True}),
        ("experts", (ATTENTION, EXPERTS), {}),
    ],
)
def test_an_adapter_is_a_change_of_weights(
    base: str,
    layers: tuple[str, ...],
    settings: dict[str, Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    model: Path = request.getfixturevalue(base)
    weights = random_weights(1, *layers)
    adapter = write_adapter(tmp_path / "adapter", weights)
    for scale in (1.0, 0.25):
        loaded = load(model, *find((adapter, scale)), **settings)
        assert same(loaded.model, with_change(model, weights, SCALE * scale, **settings))
        assert any("scales" in layer for layer in loaded.model.modules()) == (
            settings == {"dequantize": False}
        )
        assert not same(loaded.model, load(model).model, within=1e-2)


@pytest.mark.parametrize("outer", ["", "model.language_model.", "layers-only"])
@pytest.mark.parametrize(
    ("base", "layers"),
    [("dense", (ATTENTION, MLP, EMBEDDING)), ("quantised", (ATTENTION, MLP))],
)
def test_an_adapter_of_peft_is_the_same_change(
    base: str, layers: tuple[str, ...], outer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(base)
    weights = random_weights(1, *layers)
    adapter = write_peft(tmp_path / "adapter", weights, outer.removeprefix("layers-only"))
    if outer == "layers-only":  # of the inner model, as sentence-transformers has it
        held: Any = mx.load(str(adapter / peft.WEIGHTS))
        bare = {name.replace(".model.model.", ".model."): value for name, value in held.items()}
        assert bare.keys() != held.keys()
        mx.save_safetensors(str(adapter / peft.WEIGHTS), bare)
    for scale in (1.0, 0.25):
        loaded = load(model, *find((adapter, scale)), dequantize=False).model
        expected = with_change(model, weights, SCALE * scale, dequantize=False)
        assert mx.allclose(loaded(TOKENS), with_head_of(model, expected), atol=1e-4)
        assert not same(loaded, load(model).model, within=1e-2)


def test_scales_of_peft_may_differ_between_layers(dense: Path, tmp_path: Path) -> None:
    one, other = random_weights(1, ATTENTION), random_weights(2, MLP, rank=2)
    stated: dict[str, Any] = {
        "alpha_pattern": {"layers.1.self_attn.q_proj": 6},
        "rank_pattern": {"down_proj": 2},
    }
    for rooted, name in ((False, "plain"), (True, "rooted")):
        adapter = write_peft(tmp_path / name, one | other, **stated, use_rslora=rooted)
        scales = (6 / (2 if rooted else RANK), SCALE * RANK / (2**0.5 if rooted else 2))
        expected = with_change(dense, one, scales[0])
        module = dict(expected.named_modules())[MLP]
        change = other[f"{MLP}.lora_a"] @ other[f"{MLP}.lora_b"]
        module.weight = module.weight + scales[1] * change.T
        assert same(load(dense, *find(adapter)).model, expected)


@pytest.mark.parametrize("base", ["dense", "quantised"])
def test_peft_may_change_a_tied_head_alone(
    base: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(base)
    weights = random_weights(1, "lm_head")
    changed = load(path, *find(write_peft(tmp_path / "adapter", weights)), dequantize=False).model
    plain = load(path).model
    states = plain.model(TOKENS)
    change = states @ weights["lm_head.lora_a"] @ weights["lm_head.lora_b"]
    assert mx.allclose(changed(TOKENS), plain(TOKENS) + SCALE * change, atol=1e-3)


def test_peft_saves_a_tied_head_and_its_embedding(dense: Path, tmp_path: Path) -> None:
    tables = [mx.random.normal((259, 64), key=mx.random.key(seed)) / 8 for seed in range(2)]
    names = (f"{EMBEDDING}.weight", "lm_head.weight")
    weights = random_weights(1, ATTENTION)
    whole = {name: table.T for name, table in zip(names, tables, strict=True)}
    changed = load(dense, *find(write_peft(tmp_path / "adapter", weights | whole))).model
    expected = with_change(dense, weights, SCALE)
    expected.model.embed_tokens.weight = tables[0]
    assert mx.allclose(changed(TOKENS), expected.model(TOKENS) @ tables[1].T, atol=1e-4)


def test_peft_replaces_rows_of_a_quantised_table(quantised: Path, tmp_path: Path) -> None:
    rows = mx.random.normal((2, 64), key=mx.random.key(3)) / 8
    delta = {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": rows.T}
    weights = random_weights(1, ATTENTION) | delta
    adapter = write_peft(tmp_path / "adapter", weights, trainable_token_indices=[5, 9])
    changed, plain = (
        load(quantised, *adapters, dequantize=False).model.model.embed_tokens(mx.array([5, 9, 7]))
        for adapters in (find(adapter), ())
    )
    assert mx.allclose(changed[:2], rows, atol=0.05)
    assert not mx.allclose(plain[:2], rows, atol=0.05)
    assert mx.array_equal(changed[2], plain[2])


@pytest.mark.parametrize("names", ["up_proj", "w3"])
def test_peft_adapts_each_expert(names: str, experts: Path, tmp_path: Path) -> None:
    """In mlx-lm, a layer has all experts; experts that are left out stay as they are."""
    weights = random_weights(1, ATTENTION, EXPERTS)
    attention = {name: each for name, each in weights.items() if name.startswith(ATTENTION)}
    folder = write_peft(tmp_path / "adapter", attention)
    held: Any = mx.load(str(folder / peft.WEIGHTS))
    mx.eval(held)  # before the file is written again
    for number in (0, 2, 3):
        block = f"base_model.model.model.layers.1.mlp.experts.{number}.{names}"
        held[f"{block}.lora_A.weight"] = weights[f"{EXPERTS}.lora_a"][number]
        held[f"{block}.lora_B.weight"] = weights[f"{EXPERTS}.lora_b"][number]
    mx.save_safetensors(str(folder / peft.WEIGHTS), held)
    some = mx.array([1.0, 0.0, 1.0, 1.0])[:, None, None]
    weights[f"{EXPERTS}.lora_b"] = weights[f"{EXPERTS}.lora_b"] * some
    assert same(load(experts, *find(folder)).model, with_change(experts, weights, SCALE))


def test_peft_states_how_the_weights_of_gpt2_are_stored(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 64, "n_ctx": 64}
    path = write_model(
        tmp_path / "gpt2", dtype="float32", model_type="gpt2", layer_norm_epsilon=1e-5, **sizes
    )
    weights = random_weights(1, "model.h.0.attn.c_attn")
    adapter = write_peft(tmp_path / "adapter", weights, "transformer.", fan_in_fan_out=True)
    assert same(load(path, *find(adapter)).model, with_change(path, weights, SCALE))


def test_peft_saves_some_weights_whole(dense: Path, tmp_path: Path) -> None:
    """Those of modules_to_save, and adapted embeddings as they are in the model."""
    norm = mx.arange(64) / 64
    whole = {
        "model.norm.modules_to_save.default.weight": norm,
        f"{EMBEDDING}.base_layer.weight": mx.zeros((64, 259)),
    }
    weights = random_weights(1, ATTENTION)
    adapter = write_peft(tmp_path / "adapter", weights | whole)
    expected = with_change(dense, weights, SCALE)
    expected.model.norm.weight = norm
    assert same(load(dense, *find(adapter)).model, expected)


def test_dora_of_peft_is_that_of_mlx_lm(dense: Path, tmp_path: Path) -> None:
    weights = random_weights(1, ATTENTION) | {f"{ATTENTION}.m": mx.arange(1, 65) / 10}
    wanted = load(dense, *find(write_adapter(tmp_path / "mlx", weights, "dora"))).model
    adapter = write_peft(tmp_path / "peft", weights, use_dora=True)
    assert same(load(dense, *find(adapter)).model, wanted)


def test_two_adapters_add_up_with_their_own_scales(dense: Path, tmp_path: Path) -> None:
    """The adapters share a layer and differ in rank; their order does not matter."""
    first = random_weights(1, ATTENTION, MLP)
    second = random_weights(2, ATTENTION, EMBEDDING, rank=6)
    a = write_adapter(tmp_path / "a", first)
    b = write_peft(tmp_path / "b", second, lora_alpha=18)
    together = load(dense, *find((a, 0.5), b)).model
    assert same(together, load(dense, *find(b, (a, 0.5))).model)
    expected = with_change(dense, first, 0.5 * SCALE)
    for layer, factor in ((ATTENTION, -1), (EMBEDDING, 1)):
        module = dict(expected.named_modules())[layer]
        change = 3 * second[f"{layer}.lora_a"] @ second[f"{layer}.lora_b"]
        module.weight = module.weight + (change if factor == 1 else change.T)
    assert mx.allclose(together(TOKENS), with_head_of(dense, expected), atol=1e-4)


def test_dora_sets_the_length_of_every_row(dense: Path, tmp_path: Path) -> None:
    weights = random_weights(1, ATTENTION)
    length = mx.arange(1, 65) / 10
    adapter = write_adapter(tmp_path / "adapter", weights | {f"{ATTENTION}.m": length}, "dora")
    expected = with_change(dense, weights, SCALE)
    module = dict(expected.named_modules())[ATTENTION]
    norms = mx.linalg.norm(module.weight, axis=1)
    module.weight = module.weight * (length / norms)[:, None]
    assert same(load(dense, *find(adapter)).model, expected)


def test_a_full_fine_tune_replaces_weights_in_the_models_type(dense: Path, tmp_path: Path) -> None:
    name = f"{MLP}.weight"
    weight = mx.random.normal((64, 128), key=mx.random.key(3)).astype(mx.bfloat16)
    adapter = write_adapter(tmp_path / "adapter", {name: weight}, "full")
    loaded = load(dense, *find(adapter), device=METAL).model
    module = dict(loaded.named_modules())[MLP]
    assert module.weight.dtype == mx.float32
    assert mx.array_equal(module.weight, weight.astype(mx.float32))


def test_adapters_are_cast_and_counted_like_the_model(dense: Path, tmp_path: Path) -> None:
    weights = {name: weight.astype(mx.float16) for name, weight in random_weights(1, MLP).items()}
    adapter = find(write_adapter(tmp_path / "adapter", weights))
    loaded = load(dense, *adapter)
    layer = dict(loaded.model.named_modules())[MLP]
    assert (layer.lora_a.dtype, layer.lora_b.dtype) == (mx.float32, mx.float32)
    assert loaded.weights_bytes == load(dense).weights_bytes + (128 + 64) * RANK * 4
    half = load(dense, *adapter, device=METAL, dtype="bfloat16").model
    assert half(TOKENS).dtype == mx.bfloat16


def test_all_arrays_are_evaluated_before_another_thread_uses_them(
    dense: Path, tmp_path: Path
) -> None:
    weights = random_weights(1, ATTENTION) | random_weights(2, MLP)
    first = write_adapter(tmp_path / "a", weights)
    second = write_adapter(tmp_path / "b", random_weights(3, MLP))
    results: list[LoadedModel] = []

    def work() -> None:
        results.append(load(dense, *find(first, second)))
        mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert mx.isfinite(results[0].model(TOKENS)).all().item()


def test_the_digest_depends_on_files_and_scales(dense: Path, tmp_path: Path) -> None:
    a = write_adapter(tmp_path / "a", random_weights(1, MLP))
    copy = write_adapter(tmp_path / "copy", random_weights(1, MLP))
    b = write_adapter(tmp_path / "b", random_weights(2, MLP))
    digests = [adapters_digest(find(*wanted)) for wanted in ([a], [b], [a, b], [(a, 0.5)])]
    assert len({"", *digests}) == 5
    assert adapters_digest(find(copy)) == digests[0]
    assert load(dense, *find(a)).adapter_digest == digests[0]
    assert load(dense).adapter_digest == adapters_digest(()) == ""


def _edit(**changes: Any) -> Callable[[Path], None]:
    """Change adapter_config.json; None removes a key."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | changes
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / CONFIG).write_text(json.dumps(kept))

    return edit


def _parameters(**changes: Any) -> Callable[[Path], None]:
    return _edit(lora_parameters={"rank": RANK, "scale": SCALE} | changes)


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_bytes(content))


def _remove(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def _weights(change: Callable[[Weights], Mapping[str, mx.array]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        held = change(random_weights(1, ATTENTION, MLP))
        mx.save_safetensors(str(folder / WEIGHTS), dict(held))

    return edit


def _cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def _peft(change: Callable[[Weights], Weights] = dict, **stated: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        shutil.rmtree(folder)
        write_peft(folder, change(random_weights(1, ATTENTION, MLP)), **stated)

    return edit


def _as_bin(folder: Path) -> None:
    _peft()(folder)
    (folder / peft.WEIGHTS).rename(folder / "adapter_model.bin")


def void(_: object) -> None:
    return


DEFECTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "an empty folder": (_remove(CONFIG, WEIGHTS), "no adapter_config.json"),
    "no config": (_remove(CONFIG), "no adapter_config.json"),
    "a model": (
        lambda folder: void((folder / CONFIG).rename(folder / "config.json")),
        "a complete model",
    ),
    "no weights": (_remove(WEIGHTS), "no adapters.safetensors"),
    "a broken config": (_write(CONFIG, b"{"), "not valid JSON"),
    "a list for a config": (_write(CONFIG, b"[]"), "not a JSON object"),
    "an endless config": (_write(CONFIG, b" " * (2 << 20)), "at most 1 MiB"),
    "peft's config": (_edit(peft_type="LORA"), "the folder has no adapter_model.safetensors"),
    "peft for PyTorch": (_as_bin, "its weights are a PyTorch file, adapter_model.bin"),
    "another kind of peft": (_peft(peft_type="IA3"), "its peft_type is 'IA3', but only 'LORA'"),
    "peft of other layers": (_peft(layer_replication=[[0, 1]]), "its layer_replication is"),
    "peft with KaSA": (_peft(kasa_config={"a": 1}), "its kasa_config is"),
    "peft that changes the model": (
        _peft(init_lora_weights="pissa_niter_4"),
        "its init_lora_weights is 'pissa_niter_4', which also changes the weights of the model",
    ),
    "peft of something for tokens": (
        _peft(trainable_token_indices={"embed_tokens": ["a"]}),
        "trainable_token_indices is",
    ),
    "peft of other tokens": (
        _peft(
            lambda held: (
                held | {f"{EMBEDDING}.token_adapter.trainable_tokens_delta": mx.zeros((64, 2))}
            ),
            trainable_token_indices=[1, 999],
        ),
        "trainable_token_indices names 2 tokens of 'model.embed_tokens', but there are 2 rows",
    ),
    "peft of parameters of experts": (
        _peft(
            lambda held: {name.replace("mlp.down_proj", "mlp.experts"): held[name] for name in held}
        ),
        "target_parameters names 'model.layers.0.mlp.experts', which MLX has not as layers",
    ),
    "peft without alpha": (_peft(lora_alpha=None), "lora_alpha in adapter_config.json is None"),
    "a bad pattern": (_peft(alpha_pattern={"(": 1}), r"alpha_pattern has '\('"),
    "half of peft": (
        _peft(lambda held: {name: held[name] for name in held if name != f"{MLP}.lora_b"}),
        "has no lora_b",
    ),
    "peft with two ranks": (
        _peft(lambda held: held | {f"{MLP}.lora_b": mx.zeros((5, 64))}),
        r"has the ranks \[4, 5\]",
    ),
    "peft without layers": (
        _peft(lambda held: {"model.norm.weight": mx.zeros(64)}),
        "has no weights of a LoRA adapter",
    ),
    "peft of another model": (
        _peft(lambda held: {name.replace("q_proj", "qq"): held[name] for name in held}),
        "the model has no layer 'model.layers.1.self_attn.qq'",
    ),
    "several of peft": (
        _peft(lambda held: {f"{name}.lora_A.task": held[name] for name in held}),
        "it has the adapters 'task', not one without a name",
    ),
    "another kind": (_edit(fine_tune_type="prefix"), "fine_tune_type 'prefix'"),
    "no parameters": (_edit(lora_parameters=None), "no lora_parameters"),
    "no scale": (_parameters(scale=None, alpha=16), "scale .* is None.* alpha"),
    "a scale that is none": (_parameters(scale="8"), "scale .* is '8'"),
    "a rank that is none": (_parameters(rank=0), "rank .* is 0"),
    "another rank": (_parameters(rank=8), r"has rank 4, but adapter_config.json says 8"),
    "a truncated file": (_cut, "adapters.safetensors is truncated"),
    "a pointer": (_write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
    "noise": (_write(WEIGHTS, bytes(range(256)) * 9), "safetensors"),
    "a header of nonsense": (
        _write(WEIGHTS, (15).to_bytes(8, "little") + b'{"a":{"shape":3}'),
        "not a safetensors file",
    ),
    "nothing in it": (_weights(lambda held: {}), "has no weights"),
    "whole numbers": (
        _weights(lambda held: held | {f"{MLP}.lora_a": mx.zeros((128, 4), mx.int32)}),
        "type 'I32'",
    ),
    "a foreign weight": (
        _weights(lambda held: held | {f"{MLP}.bias": mx.zeros((64,))}),
        "not a weight of a lora adapter",
    ),
    "half a pair": (
        _weights(lambda held: {name: held[name] for name in held if name != f"{MLP}.lora_b"}),
        "has no lora_b",
    ),
    "a vector": (
        _weights(lambda held: held | {f"{MLP}.lora_a": mx.zeros((128,))}),
        "have shapes",
    ),
    "ranks that differ": (
        _weights(lambda held: held | {f"{MLP}.lora_b": mx.zeros((5, 64))}),
        "has rank 5",
    ),
    "wrong shapes": (
        _weights(lambda held: held | {f"{MLP}.lora_a": mx.zeros((96, 4))}),
        r"has shape \(96, 4\), but the model needs \(128, 4\)",
    ),
    "an unknown layer": (
        _weights(
            lambda held: {
                name.replace("layers.1.", "layers.7."): weight for name, weight in held.items()
            }
        ),
        "no layer 'model.layers.7.self_attn.q_proj'; did you mean",
    ),
    "a layer of another kind": (
        _weights(
            lambda held: {
                name.replace("mlp.down_proj", "input_layernorm"): weight
                for name, weight in held.items()
            }
        ),
        "is a RMSNorm, to which no lora adapter can be applied",
    ),
    "dora without lengths": (_edit(fine_tune_type="dora"), "has no m"),
    "a full one of another model": (_edit(fine_tune_type="full"), "the model has no weight"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_has_its_own_message(defect: str, dense: Path, tmp_path: Path) -> None:
    spoil, why = DEFECTS[defect]
    folder = write_adapter(tmp_path / "adapter", random_weights(1, ATTENTION, MLP))
    spoil(folder)
    with pytest.raises(ModelRejected) as caught:
        load(dense, *find("adapter", root=tmp_path))
    message = str(caught.value)
    assert message.startswith("adapter 'adapter' cannot be applied: ")
    assert re.search(why, message)
    assert str(tmp_path) not in message


def test_a_full_fine_tune_of_dense_weights_does_not_fit_quantised_ones(
    quantised: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", {f"{MLP}.weight": mx.zeros((64, 128))}, "full")
    with pytest.raises(ModelRejected, match="but the quantised model has"):
        load(quantised, *find(adapter))


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_a_full_fine_tune_can_be_neither_added_nor_scaled(kind: str, tmp_path: Path) -> None:
    own = {f"{MLP}.weight": mx.zeros((64, 128))}
    if kind == "dora":
        own = random_weights(1, MLP) | {f"{MLP}.m": mx.ones((64,))}
    adapter = write_adapter(tmp_path / "own", own, kind)
    lora = write_adapter(tmp_path / "lora", random_weights(1, MLP))
    with pytest.raises(InvalidRequest, match="name it alone"):
        find(lora, adapter)
    with pytest.raises(InvalidRequest, match="cannot be scaled"):
        find((adapter, 0.5))


def test_references_are_paths_folders_of_the_host_or_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "models" / "loras" / "one", random_weights(1, MLP))
    root = tmp_path / "models"
    assert find(folder)[0].weights == find("loras/one", root=root)[0].weights
    with pytest.raises(InvalidRequest, match="named twice"):
        find(folder, "loras/one", root=root)
    with pytest.raises(ModelRejected, match=r"adapter '\.\./models/loras/one' leaves its folder"):
        find("../models/loras/one", root=root / "loras")
    with pytest.raises(ModelRejected, match="it is a file"):
        find(f"loras/one/{WEIGHTS}", root=root)
    for missing in ("one", "/nowhere/one", "a\0b"):
        with pytest.raises((ModelNotFound, ModelRejected), match=r"^adapter "):
            find(missing, root=root)
    asked: list[tuple[HubModel, tuple[str, ...]]] = []

    def fetch(place: HubModel, patterns: tuple[str, ...], *_: object) -> Path:
        asked.append((place, patterns))
        return folder

    monkeypatch.setattr(hub_process, "fetch", fetch)
    assert find("owner/lora@v2", root=root)[0].weights == folder / WEIGHTS
    assert asked == [
        (HubModel("owner/lora", "v2", "owner/lora@v2"), (CONFIG, WEIGHTS, peft.WEIGHTS))
    ]


async def _says(engine: Engine) -> str:
    drawn = Sampling(temperature=1.0, seed=1)
    request = GenerationRequest("1", RawPrompt("a b c"), drawn, max_tokens=24, ignore_eos=True)
    async with engine.submit(request) as generation:
        events = [event async for event in generation]
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def test_another_load_switches_adapters(dense: Path, tmp_path: Path) -> None:
    weights = random_weights(1, ATTENTION, MLP)
    write_adapter(tmp_path / "one", weights)
    merged = shutil.copytree(dense, tmp_path / "merged")
    edited = {
        name: module.weight
        for name, module in with_change(dense, weights, SCALE).named_modules()
        if name in (ATTENTION, MLP)
    }
    whole = read_weights(dense) | {f"{name}.weight": weight for name, weight in edited.items()}
    write_weights(merged, whole)
    engine = Engine()
    engine.start()
    try:
        answers = []
        for path, adapters in (
            (dense, ()),
            (merged, ()),
            (dense, (AdapterRequest("one"),)),
            (dense, ()),
        ):
            await engine.load(LoadRequest("m", str(path), str(tmp_path), adapters=adapters))
            answers.append(await _says(engine))
        assert answers[0] == answers[3] != answers[1] == answers[2]
        (tmp_path / "one" / WEIGHTS).unlink()
        with pytest.raises(EngineError, match=WEIGHTS):
            await engine.load(
                LoadRequest("m", str(dense), str(tmp_path), adapters=(AdapterRequest("one"),))
            )
        assert await _says(engine) == answers[0]
    finally:
        await engine.stop(10)
