"""Real weights, loaded as the engine loads them: cast, complete, off the main thread."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchLinear

from backend.engine.device import Device
from backend.engine.errors import EngineError, InvalidRequest, ModelRejected
from backend.engine.load_request import LoadRequest
from backend.engine.loading import weights
from backend.engine.loading.checkpoint import inspect
from backend.engine.loading.loader import load as load_whole
from backend.engine.loading.weights import LoadedModel, load_model, reason_of
from backend.engine.settings import Settings
from backend.engine.units import GIB
from tests.engine.loading_models import CHAT_TEMPLATE, read_weights, write_model, write_weights
from tests.engine.loads import at_once

Result = TypeVar("Result")

CPU = Device("cpu", "a CPU", 64 * GIB, 64 * GIB)
METAL = Device("metal", "an Apple GPU", 64 * GIB, 64 * GIB)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense", shards=2)


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "quantised", bits=4, dtype="float16")


def load(path: Path, device: Device = CPU, wish: str = "", **settings: Any) -> LoadedModel:
    chosen = Settings(**settings)
    return at_once(load_model(inspect(path, path.name, chosen), chosen, device, dtype=wish))


def in_thread(work: Callable[[], Result]) -> Result:
    """The result of work that ran on a thread of its own, which has ended."""
    results: list[Result] = []

    def run() -> None:
        results.append(work())
        mx.clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_properties_of_a_loaded_model(dense: Path) -> None:
    loaded = load(dense)
    assert loaded.name == "dense"
    assert loaded.model_type == "llama"
    assert loaded.context_size == 2048
    assert loaded.chat_template == CHAT_TEMPLATE
    assert loaded.eos_token_ids == {0, 2}  # the configuration's and the tokenizer's
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("zwölf 🙂")) == "zwölf 🙂"
    logits = loaded.model(mx.array([[5, 6, 7]]))
    assert logits.shape == (1, 3, 259)


@pytest.mark.parametrize(
    ("device", "wish", "settings", "expected"),
    [
        (CPU, "", {}, "float32"),
        (CPU, "float16", {}, "float16"),
        (METAL, "", {}, "bfloat16"),
        (METAL, "float32", {}, "float32"),
        (METAL, "float32", {"dtype": "float16"}, "float16"),
    ],
)
def test_weights_have_the_dtype_of_the_device_or_of_the_option(
    dense: Path, device: Device, wish: str, settings: dict[str, Any], expected: str
) -> None:
    loaded = load(dense, device, wish, **settings)
    assert loaded.dtype == expected
    types = {array.dtype for array in weights._parameters(loaded.model)}
    assert types == {getattr(mx, expected)}


def test_scales_and_biases_are_cast_and_packed_weights_are_not(quantised: Path) -> None:
    layer = load(quantised, dequantize=False).model.layers[0].mlp.up_proj
    assert (layer.weight.dtype, layer.scales.dtype, layer.biases.dtype) == (
        mx.uint32,
        mx.float32,
        mx.float32,
    )
    kept = load(quantised, METAL)
    assert kept.model.layers[0].mlp.up_proj.scales.dtype == mx.float16
    assert kept.dtype == "float16"


def test_a_cast_does_not_change_what_the_model_computes(quantised: Path) -> None:
    tokens = mx.array([[5, 6, 7]])
    cast = load(quantised, dequantize=False).model(tokens)
    kept = load(quantised, METAL).model(tokens)
    assert cast.dtype == mx.float32
    assert mx.allclose(cast, kept.astype(mx.float32), atol=0.05)


def test_a_model_can_name_weights_that_stay_in_full_precision(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models.llama import Model

    monkeypatch.setattr(
        Model, "cast_predicate", property(lambda _: lambda path: "norm" not in path), raising=False
    )
    model = load(dense, METAL, "float16").model
    assert model.model.norm.weight.dtype == mx.bfloat16
    assert model.layers[0].mlp.up_proj.weight.dtype == mx.float16


def test_the_scales_of_whole_experts_stay_in_full_precision() -> None:
    model = Module()
    experts = SwitchLinear(64, 32, 4).to_quantized(16, 4, "nvfp4", global_scale=True)
    model.experts = experts
    weights.cast(model, "float16")
    assert (experts.bias.dtype, experts.global_scale.dtype) == (mx.float16, mx.float32)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    ],
)
def test_all_arrays_are_evaluated_before_another_thread_uses_them(
    tmp_path: Path, scaling: dict[str, Any] | None
) -> None:
    path = write_model(tmp_path / "model", rope_scaling=scaling)
    loaded = in_thread(lambda: load(path))
    # If a rope frequency were still lazy, this would fail: its stream ended with the thread.
    assert mx.isfinite(loaded.model(mx.array([[1, 2, 3]]))).all().item()


def test_a_dropped_model_releases_its_memory(dense: Path) -> None:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    loaded = load(dense)
    size = loaded.weights_bytes
    assert size == sum(array.nbytes for array in weights._parameters(loaded.model))
    assert mx.get_active_memory() - before >= size
    del loaded
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() <= before + 1024


def test_the_peak_of_a_cast_stays_near_the_final_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model", hidden_size=256, num_hidden_layers=8)
    monkeypatch.setattr(weights, "_SLICE_BYTES", 1 << 18)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(path)
    assert mx.get_peak_memory() - before < 1.25 * loaded.weights_bytes


def test_each_slice_of_the_weights_is_a_stage(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SLICE_BYTES", 1)
    evaluate, evaluated = mx.eval, 0

    def counted(*arrays: Any) -> None:
        nonlocal evaluated
        evaluated += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    in_a_stage = set()
    for _ in load_model(inspect(dense, "dense", Settings()), Settings(), CPU):
        in_a_stage.add(evaluated)
        evaluated = 0
    assert in_a_stage == {0, 1}


def test_an_abandoned_load_keeps_nothing_of_the_model(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SLICE_BYTES", 1)
    gc.collect()
    before = mx.get_active_memory()
    stages = load_model(inspect(dense, "dense", Settings()), Settings(), CPU)
    while mx.get_active_memory() < before + 64 * 1024:
        next(stages)
    stages.close()
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() <= before + 1024


def test_an_error_keeps_nothing_of_the_model(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SLICE_BYTES", 1)
    gc.collect()
    before = mx.get_active_memory()
    evaluate = mx.eval

    def fail_in_the_middle(*arrays: Any) -> None:
        if mx.get_active_memory() > before + 64 * 1024:
            raise ModelRejected("a file is gone")  # pytest keeps logged objects
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", fail_in_the_middle)
    with pytest.raises(ModelRejected) as rejected:
        load(dense)
    assert rejected.value.__context__ is None
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() <= before + 1024


def test_the_progress_of_a_slow_load_is_logged(
    dense: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "_SLICE_BYTES", 1)
    caplog.set_level(logging.INFO)
    load(dense)
    assert "weights" not in caplog.text
    monkeypatch.setattr(weights, "_PROGRESS_SECONDS", 0.0)
    load(dense)
    assert "loading weights: 0 of 0 MiB" in caplog.text
    assert "loaded 0 MiB of weights in" in caplog.text


def test_weights_above_the_memory_limit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", hidden_size=256, num_hidden_layers=8)
    with pytest.raises(ModelRejected, match=r"weights take \d MiB and MLX may use 1 MiB; raise"):
        load(path, memory_limit_mib=1)


def test_special_tokens_can_be_configured(dense: Path) -> None:
    loaded = load(dense, eos_token="<|im_start|>", pad_token="<|endoftext|>")
    assert loaded.tokenizer.eos_token_id == 1
    assert loaded.tokenizer.pad_token_id == 0
    assert loaded.eos_token_ids == {0, 1}
    assert len(loaded.tokenizer) == 259


def test_a_special_token_outside_the_vocabulary_is_refused(dense: Path) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        load(dense, eos_token="<|im-end|>")
    sentence = "eos_token '<|im-end|>' is not a token of this model; did you mean '<|im_end|>'?"
    assert str(refusal.value) == sentence


def test_end_tokens_come_from_every_source(tmp_path: Path) -> None:
    thinker = {"text_config": {"eos_token_id": 13}}
    parts: dict[str, Any] = {"language_config": {"eos_token_id": [12]}, "thinker_config": thinker}
    parts["llm_config"] = {"eos_token_id": 14}
    path = write_model(tmp_path / "model", eos_token_id=[7, 8], **parts)
    (path / "generation_config.json").write_text('{"eos_token_id": [9, 10]}')
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    stated = {"eos_token_ids": [11], "eos_token_id": 15}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer | stated))
    assert load(path).eos_token_ids == {2, *range(7, 16)}


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    loaded = load(path)
    assert loaded.chat_template is None
    assert loaded.eos_token_ids == {0}


def break_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text('{"version": "1.0", ')


def break_tokenizer_config(path: Path) -> None:
    (path / "tokenizer_config.json").write_text("[")


def drop_a_weight(path: Path) -> None:
    held = read_weights(path)
    del held["model.norm.weight"]
    write_weights(path, held)


def misshape_a_weight(path: Path) -> None:
    held = read_weights(path)
    write_weights(path, held | {"model.norm.weight": mx.zeros((3,))})


def drop_a_size(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    del config["hidden_size"]
    (path / "config.json").write_text(json.dumps(config))


def ask_for_an_absent_package(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "olmo"}))


def nest_a_file(path: Path) -> None:
    (path / "tokenizer_config.json").write_text("[" * 100_000)


def add_a_weight(path: Path) -> None:
    write_weights(path, read_weights(path) | {"model.other.weight": mx.zeros((3,))})


def leave_weights_in_fp8(path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    held = read_weights(path)
    write_weights(path, held | {name: mx.to_fp8(held[name])})


def quantise_by_another_method(path: Path) -> None:
    _configure(path, quantization_config={"quant_method": "hqq", "bits": 4})
    held = read_weights(path)
    write_weights(path, held | {"model.layers.0.self_attn.q_proj.meta": mx.zeros((3,))})


def omit_the_method(path: Path) -> None:
    _configure(path, quantization_config={"bits": 4, "group_size": 32})


def _configure(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (break_tokenizer, "tokenizer.json is not valid JSON"),
        (break_tokenizer_config, "model 'model' cannot be loaded: "),
        (
            drop_a_weight,
            "its weights lack 1 of the tensors that models of this type have in MLX: model.norm",
        ),
        (leave_weights_in_fp8, "the weights of model.layers.0.self_attn.q_proj are whole numbers"),
        (quantise_by_another_method, "quantised by 'hqq', in a form that cannot be read for this"),
        (omit_the_method, "its files lack 'quant_method'"),
        (misshape_a_weight, "Expected shape (64,) but received shape (3,)"),
        (
            nest_a_file,
            "tokenizer_config.json is not valid JSON: its lists and objects are nested too deeply",
        ),
        (drop_a_size, "config.json lacks 'hidden_size', which models of this type need in MLX"),
        (add_a_weight, "its weights include 1 tensors that models of this type do not have in MLX"),
        (ask_for_an_absent_package, "needs a Python package that is not installed"),
    ],
)
def test_any_failure_is_one_message_without_paths(
    tmp_path: Path, break_it: Callable[[Path], None], sentence: str
) -> None:
    path = write_model(tmp_path / "model")
    break_it(path)
    with pytest.raises(EngineError) as refusal:
        load(path)
    assert isinstance(refusal.value, ModelRejected)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) not in str(refusal.value)


def test_messages_have_no_path_and_no_phrase_that_hosts_react_to() -> None:
    error = OSError("cannot open /srv/models/secret/model.safetensors: Unimplemented\nmore")
    assert reason_of(error, Path("/x/y")) == "cannot open a file: not implemented"
    assert reason_of(ValueError()) == "ValueError"


def test_code_in_a_checkpoint_runs_only_with_trust(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", model_file="own.py")
    (path / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    with pytest.raises(ModelRejected, match="brings its own Python code"):
        load(path)
    assert load(path, trust_remote_code=True).model_type == "llama"


def test_the_text_part_of_a_vision_model_is_served_if_requested(tmp_path: Path) -> None:
    text = {"model_type": "qwen3", "vocab_size": 259, "max_position_embeddings": 512}
    path = write_model(tmp_path / "plain", model_type="qwen3")
    held = {f"model.language_{name}": value for name, value in read_weights(path).items()}
    config = json.loads((path / "config.json").read_text())
    config = {"model_type": "qwen3_vl", "vision_config": {"depth": 1}, "text_config": config | text}
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path, held | {"model.visual.patch_embed.weight": mx.zeros((2, 2))})
    loaded = load(path, type="text")
    assert (loaded.model_type, loaded.context_size) == ("qwen3_vl", 512)
    assert mx.isfinite(loaded.model(mx.array([[1, 2]]))).all().item()


@pytest.mark.parametrize(("selected", "tokens"), [(None, 512), (4096, 2048)])
def test_a_model_that_selects_tokens_reads_prompts_in_mlx_lms_steps(
    selected: int | None, tokens: int, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model", index_topk=selected)
    with patch("backend.engine.device.detect", return_value=CPU):
        engine, _, _ = at_once(load_whole(LoadRequest("it", str(path)), 1, threading.Event()))
    assert engine is not None
    assert engine.prefill_chunk == tokens
