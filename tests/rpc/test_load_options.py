"""Every field of ModelOptions is read, refused by name, or listed as having no meaning."""

from __future__ import annotations

import math
from typing import Any

import pytest

from backend.engine.errors import InvalidRequest
from backend.engine.load_request import AdapterRequest, LoadRequest
from backend.rpc.fields import MODEL_OPTIONS
from backend.rpc.load_options import load_request
from tests.rpc.recorder import Recorder
from tests.rpc.requests_of_hosts import model_options
from wire import backend_pb2 as pb


def refusal(**changes: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load_request(model_options(**changes))
    return str(caught.value)


def test_the_tables_list_exactly_the_fields_that_are_read() -> None:
    recorder = Recorder(model_options())
    load_request(recorder)  # type: ignore[arg-type]
    assert recorder.read == {*MODEL_OPTIONS.used, *MODEL_OPTIONS.refused}


def test_the_hosts_defaults_are_accepted() -> None:
    request, warnings = load_request(model_options())
    assert request == LoadRequest(
        model="mlx-community/tiny",
        model_file="/models/mlx-community/tiny",
        model_path="/models",
        context_size=4096,
        settings={"tool_parser": "hermes", "reasoning_parser": "qwen3"},
    )
    assert warnings == []


REFUSED_VALUES: dict[str, list[Any]] = {
    "LoraBase": ["b"],
    "MMProj": ["/models/mmproj"],
    "Quantization": ["awq"],
    "LoadFormat": ["gguf"],
    "Tokenizer": ["other/tokenizer"],
    "Overrides": [["a=int:1"]],
    "RopeScaling": ["yarn"],
    "RopeFreqBase": [1e6],
    "RopeFreqScale": [0.5],
    "YarnExtFactor": [1.0],
    "YarnAttnFactor": [0.5],
    "YarnBetaFast": [16.0],
    "YarnBetaSlow": [2.0],
    "TensorParallelSize": [2, -1],
}


def test_each_refused_field_is_tested() -> None:
    assert set(REFUSED_VALUES) == set(MODEL_OPTIONS.refused)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in REFUSED_VALUES.items() for value in values],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(**{name: value}).startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LoadFormat", "auto"),
        ("RopeScaling", "none"),
        ("RopeFreqScale", 1.0),
        ("YarnExtFactor", -1.0),
        ("YarnBetaFast", 32.0),
        ("TensorParallelSize", 1),
        ("LoraScale", 1.0),
        ("GPUMemoryUtilization", 0.9),
        ("F16Memory", True),
        ("MLock", True),
        ("Type", "AutoModelForCausalLM"),
        ("GrammarTriggers", [pb.GrammarTrigger(word="<tool_call>")]),
        ("Proxy", pb.ProxyOptions(mode="x")),
    ],
)
def test_a_field_that_changes_nothing_is_accepted(name: str, value: Any) -> None:
    load_request(model_options(**{name: value}))


@pytest.mark.parametrize(
    ("context", "length", "meant"), [(0, 0, 0), (512, 0, 512), (0, 256, 256), (512, 256, 256)]
)
def test_the_smaller_of_two_limits_counts(context: int, length: int, meant: int) -> None:
    options = pb.ModelOptions(Model="m", ContextSize=context, MaxModelLen=length)
    assert load_request(options)[0].context_size == meant


@pytest.mark.parametrize(("length", "meant"), [(0, 0), (256, 256)])
def test_the_models_own_context_may_be_asked_for(length: int, meant: int) -> None:
    """LocalAI sends 4096 if the model file has no context_size."""
    options = pb.ModelOptions(
        Model="m", ContextSize=4096, MaxModelLen=length, Options=["context:max"]
    )
    assert load_request(options)[0].context_size == meant


@pytest.mark.parametrize("name", ["ContextSize", "MaxModelLen"])
def test_a_negative_limit_is_refused(name: str) -> None:
    assert refusal(**{name: -1}).startswith(f"{name} is -1")


def test_a_load_must_name_a_model() -> None:
    with pytest.raises(InvalidRequest, match="Model is empty"):
        load_request(pb.ModelOptions(ModelPath="/models"))
    assert load_request(pb.ModelOptions(ModelFile="/models/m"))[0].model == ""


@pytest.mark.parametrize("name", ["Model", "ModelFile", "ModelPath", "DraftModel"])
def test_a_reference_with_a_nul_is_refused(name: str) -> None:
    assert refusal(**{name: "a\0b"}).startswith(f"{name} contains a NUL")


@pytest.mark.parametrize(
    ("field", "options", "meant"),
    [(False, [], False), (True, [], True), (False, ["trust_remote_code:true"], True)],
)
def test_remote_code_is_trusted_only_if_requested(
    field: bool, options: list[str], meant: bool
) -> None:
    request, _ = load_request(pb.ModelOptions(Model="m", TrustRemoteCode=field, Options=options))
    assert request.trust_remote_code is meant


def test_unknown_options_warn_and_unknown_engine_args_fail() -> None:
    _, warnings = load_request(pb.ModelOptions(Model="m", Options=["paralel:4"]))
    assert "parallel" in warnings[0]
    with pytest.raises(InvalidRequest, match="parallel"):
        load_request(pb.ModelOptions(Model="m", EngineArgs='{"paralel": 4}'))


def test_cache_types_are_passed_on() -> None:
    request, _ = load_request(model_options(CacheTypeKey="q8_0", CacheTypeValue="Q8_0"))
    assert (request.cache_type_key, request.cache_type_value) == ("q8_0", "Q8_0")


def test_one_or_several_adapters_may_be_named_and_a_scale_of_0_means_1() -> None:
    request, _ = load_request(
        model_options(
            LoraAdapter="one", LoraScale=0.5, LoraAdapters=["a", "b", "c"], LoraScales=[2, 0]
        )
    )
    assert request.adapters == (
        AdapterRequest("one", 0.5),
        AdapterRequest("a", 2.0),
        AdapterRequest("b", 1.0),
        AdapterRequest("c", 1.0),
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"LoraAdapters": ["a"], "LoraScales": [1, 1]}, "LoraScales has 2 entries, but"),
        ({"LoraScales": [1]}, "LoraScales has 1 entries, but"),
        ({"LoraScale": 0.5}, "LoraScale is 0.5, but LoraAdapter is empty"),
        ({"LoraAdapter": "a", "LoraScale": -1}, "LoraAdapter has an adapter with the scale -1"),
        ({"LoraAdapters": ["a"], "LoraScales": [math.nan]}, "the scale nan"),
        ({"LoraAdapters": ["a"], "LoraScales": [math.inf]}, "the scale inf"),
        ({"LoraAdapters": ["a", " "]}, "LoraAdapters names an empty adapter"),
        ({"LoraAdapter": "a\0b"}, "LoraAdapter contains a NUL"),
    ],
)
def test_impossible_adapter_settings_are_refused(fields: dict[str, Any], why: str) -> None:
    assert why in refusal(**fields)


def test_adapters_from_which_requests_choose_have_names() -> None:
    request, _ = load_request(model_options(Options=["adapters: sql=/models/sql , fr = org/fr"]))
    assert request.choices == (
        ("sql", AdapterRequest("/models/sql")),
        ("fr", AdapterRequest("org/fr")),
    )
    assert load_request(model_options(Options=["adapters:"]))[0].choices == ()


@pytest.mark.parametrize("value", ["sql", "=a", "sql=", "a b=c", "a=b,a=c", f"{'x' * 101}=a"])
def test_adapters_without_a_usable_name_are_refused(value: str) -> None:
    assert "write name=reference" in refusal(Options=[f"adapters:{value}"])


def test_too_many_adapters_are_refused() -> None:
    many = ",".join(f"a{at}=b{at}" for at in range(65))
    assert "65 adapters: name at most 64" in refusal(Options=[f"adapters:{many}"])
