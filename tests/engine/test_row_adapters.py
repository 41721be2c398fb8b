"""Adapters of which each request chooses one: rows with different adapters share their passes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize

from backend.engine.errors import ModelRejected
from backend.engine.load_request import AdapterRequest
from backend.engine.loading.adapter_layers import apply_adapters
from backend.engine.loading.adapters import CONFIG, WEIGHTS, Adapter, inspect_adapter
from backend.engine.loading.row_adapters import RowAdapters, choose_among, no_adapters
from backend.engine.loading.stages import at_once
from tests.architectures.shapes import UNBUILT, architectures, tiny_model
from tests.engine.kv_models import words
from tests.engine.random_models import CONFIGS, random_model
from tests.engine.rounds import Rounds, alone, engine_model
from tests.engine.test_loading_adapters import write_adapter, write_peft
from tests.engine.test_parity import check_schedule
from tests.long import TEST_LONG

# Experts get the tokens that chose them; AltUp reads its weights; Metal compiles a step.
_REFUSED = {
    "afm7": "a FusedLinear",
    "dbrx": "a layer gets only some of the tokens",
    "gemma3n": "no attribute 'weight'",
    "kimi_k3": "part of a compiled function",
}
_ALL = [name for name in architectures() if name not in (*UNBUILT, "phi3small")]
# A loop over tokens, and compressed tokens.
_OTHERS = ["deepseek_v41", "mamba"]
_ARCHITECTURES = _ALL if TEST_LONG else sorted({*_REFUSED, *_OTHERS, *_ALL[3::16]})
RANKS = {"one": 2, "two": 4, "three": 3}


def write_choices(folder: Path, model: Any, scale: float = 0.2, **ranks: int) -> dict[str, Adapter]:
    """Write adapters of a model's linear layers, some of which only the first one changes."""
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, Linear) and any(map(str.isdigit, path.split(".")))
    ]
    found = {}
    for seed, (name, rank) in enumerate((ranks or RANKS).items()):
        keys = iter(mx.random.split(mx.random.key(seed), 2 * len(layers)))
        weights = {}
        for path, layer in layers if seed == 0 else layers[1:]:
            outputs, inputs = layer.weight.shape
            for part, shape in (("lora_a", (inputs, rank)), ("lora_b", (rank, outputs))):
                weights[f"{path}.{part}"] = scale * mx.random.normal(shape, key=next(keys))
        write_adapter(folder / name, weights, rank=rank, scale=1.0 + seed)
        found[name] = inspect_adapter(folder / name, AdapterRequest(name))
    return found


def add_dora(folder: Path, choices: dict[str, Adapter]) -> None:
    """Add an adapter as `one`, which also changes the length of each vector of weights."""
    shutil.copytree(folder / "one", folder / "dora")
    config = json.loads((folder / "dora" / CONFIG).read_text()) | {"fine_tune_type": "dora"}
    (folder / "dora" / CONFIG).write_text(json.dumps(config))
    weights = mx.load(str(folder / "dora" / WEIGHTS))
    assert isinstance(weights, dict)
    for name, value in list(weights.items()):
        if name.endswith("lora_b"):
            length = 1 + mx.random.uniform(shape=value.shape[1:], key=mx.random.key(len(name)))
            weights[f"{name.removesuffix('lora_b')}m"] = length
    mx.save_safetensors(str(folder / "dora" / WEIGHTS), weights)
    choices["dora"] = inspect_adapter(folder / "dora", AdapterRequest("dora"))


def add_choices(model: Any, choices: dict[str, Adapter]) -> RowAdapters:
    adapters = no_adapters(model)
    at_once(choose_among(choices, model, adapters, lambda _: None))
    return adapters


def numbers(adapters: RowAdapters, *names: str) -> list[int]:
    return [adapters.numbers[name] if name else 0 for name in names]


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_row_computes_what_its_adapter_computes_alone(
    kind: str, bits: int, tmp_path: Path
) -> None:
    choices = write_choices(tmp_path, random_model(kind))
    tokens = mx.array([words(9, row) for row in range(4)]) % 96

    def model() -> Any:
        made = random_model(kind)
        if bits:
            quantize(made, 32, bits, class_predicate=_fits)
        return made

    served = model()
    adapters = add_choices(served, choices)
    with adapters.using(numbers(adapters, "two", "", "one", "three")):
        together = served(tokens)
    for row, name in enumerate(["two", "", "one", "three"]):
        own = model()
        apply_adapters(own, [choices[name]] if name else [])
        assert mx.allclose(own(tokens[row : row + 1])[0], together[row], atol=1e-4), name
    assert mx.allclose(served(tokens), model()(tokens), atol=1e-5)
    assert not mx.allclose(together[0], served(tokens)[0], atol=1e-2)


def check_rows(
    new: Callable[[], Any],
    served: Any,
    adapters: RowAdapters,
    names: Sequence[str],
    choices: dict[str, Adapter],
) -> None:
    """Compare each row with a model of its own, to which its adapter is applied."""
    tokens = mx.array([words(9, row) for row in range(len(names))]) % 96
    with adapters.using(numbers(adapters, *names)):
        together = served(tokens)
    for row, name in enumerate(names):
        own = new()
        bare = own(tokens[row : row + 1])[0]
        apply_adapters(own, [choices[name]] if name else [])
        expected = own(tokens[row : row + 1])[0]
        assert mx.abs(expected - together[row]).max() < 1e-4 * mx.abs(expected).max(), name
        assert not name or mx.abs(expected - bare).max() > 1e-3 * mx.abs(bare).max(), name


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_choose_dora(bits: int, bias: bool, tmp_path: Path) -> None:
    choices = write_choices(tmp_path, random_model("full"), one=2)
    add_dora(tmp_path, choices)

    def model() -> Any:
        made = random_model("full")
        if bias:
            for _, module in made.named_modules():
                if isinstance(module, Linear):
                    module.bias = mx.random.normal(module.weight.shape[:1], key=mx.random.key(1))
        if bits:
            quantize(made, 32, bits, class_predicate=_fits)
        return made

    served, names = model(), ["dora", "", "one"]
    adapters = add_choices(served, choices)
    check_rows(model, served, adapters, names, choices)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_rows_of_an_architecture_compute_what_they_compute_alone(
    architecture: str, tmp_path: Path
) -> None:
    def model() -> Any:
        return tiny_model.__wrapped__(architecture)

    served, names = model(), ["two", "", "one"]
    choices = write_choices(tmp_path, served, 0.1, one=2, two=4)
    if architecture in _REFUSED:
        before = {path: type(module) for path, module in served.named_modules()}
        with pytest.raises(ModelRejected, match=rf"{_REFUSED[architecture]}.*LoraAdapter"):
            add_choices(served, choices)
        assert {path: type(module) for path, module in served.named_modules()} == before
        return
    adapters = add_choices(served, choices)
    check_rows(model, served, adapters, names, choices)


def _fits(path: str, module: Any) -> bool:
    return isinstance(module, Linear) and module.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_row_has_the_tokens_that_it_has_alone(kind: str, tmp_path: Path) -> None:
    served = random_model(kind)
    adapters = add_choices(served, write_choices(tmp_path, served))
    mx.eval(served.parameters())
    model = engine_model(served, adapters=adapters)
    seen: Counter[str] = Counter()
    for seed in range(24 if TEST_LONG else 8):
        seen += check_schedule(model, seed)
    assert seen["tokens compared"] > 200
    assert seen["rows served from the prefix cache"] > 5


@pytest.mark.usefixtures("each_order")
def test_equal_prompts_share_kv_only_with_the_same_adapter(tmp_path: Path) -> None:
    served = random_model("full")
    adapters = add_choices(served, write_choices(tmp_path, served))
    model = engine_model(served, adapters=adapters)
    rounds = Rounds(model)
    prompt = [token % 90 + 1 for token in words(600, 1)]
    expected = {name: alone(model, prompt, 8, adapter=name).tokens for name in ("", *RANKS)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    cached = {}
    for ticket, name in enumerate(["", "one", "two", "three", "one", ""]):
        rounds.submit(ticket, prompt, 8, adapter=name)
        rounds.drain()
        assert rounds.received[ticket].tokens == expected[name]
        finished = rounds.received[ticket].finished
        assert finished is not None
        cached[ticket] = finished.usage.cached_tokens
    assert [cached[ticket] > 500 for ticket in range(6)] == [False] * 4 + [True] * 2


def test_adapters_that_rows_cannot_choose_are_refused(tmp_path: Path) -> None:
    model = random_model("full")
    shapes = {"lora_a": (96, 2), "lora_b": (2, 32)}
    weights = {
        f"model.embed_tokens.{name}": mx.random.normal(shape) for name, shape in shapes.items()
    }
    write_adapter(tmp_path / "embedding", weights, rank=2)
    adapter = inspect_adapter(tmp_path / "embedding", AdapterRequest("embedding"))
    with pytest.raises(ModelRejected, match=r"embed_tokens.*, a Embedding.*LoraAdapter"):
        add_choices(model, {"embedding": adapter})


def test_an_adapter_with_a_bias_is_refused(tmp_path: Path) -> None:
    path, model = "model.layers.0.self_attn.q_proj", random_model("full")
    outputs, inputs = dict(model.named_modules())[path].weight.shape
    shapes = {"lora_a": (inputs, 2), "lora_b": (2, outputs), "lora_B.bias": (outputs,)}
    weights = {f"{path}.{name}": mx.random.normal(shape) for name, shape in shapes.items()}
    write_peft(tmp_path / "biased", weights, r=2, lora_bias=True)
    adapter = inspect_adapter(tmp_path / "biased", AdapterRequest("biased"))
    with pytest.raises(ModelRejected, match=rf"{path}' \(lora_bias\)"):
        add_choices(model, {"biased": adapter})


def test_the_output_layer_is_refused_wherever_it_is(tmp_path: Path) -> None:
    model = tiny_model.__wrapped__("gemma3")
    path = "language_model.lm_head"
    outputs, inputs = model.language_model.lm_head.weight.shape
    shapes = {"lora_a": (inputs, 2), "lora_b": (2, outputs)}
    weights = {f"{path}.{name}": mx.random.normal(shape) for name, shape in shapes.items()}
    write_adapter(tmp_path / "head", weights, rank=2)
    adapter = inspect_adapter(tmp_path / "head", AdapterRequest("head"))
    with pytest.raises(ModelRejected, match=rf"{path}.*outside the blocks"):
        add_choices(model, {"head": adapter})


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rows_of_a_model_in_half_precision_choose(dtype: mx.Dtype, tmp_path: Path) -> None:
    choices = write_choices(tmp_path, random_model("full"))
    tokens = mx.array([words(9, row) for row in range(2)]) % 96

    def logits(dtype: mx.Dtype) -> mx.array:
        model = random_model("full")
        model.set_dtype(dtype)
        adapters = add_choices(model, choices)
        with adapters.using(numbers(adapters, "two", "one")):
            found: mx.array = model(tokens)
        assert found.dtype == dtype
        return found.astype(mx.float32)

    expected = logits(mx.float32)
    assert mx.abs(logits(dtype) - expected).max() < 0.1 * mx.abs(expected).max()
