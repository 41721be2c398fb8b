"""Settings are right at load time, or the load fails with a sentence."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from backend.engine.errors import InvalidRequest
from backend.engine.settings import RULES, SPECIAL_TOKENS, Settings, render_table, weight_dtype
from backend.rpc.load_options import WITHOUT_EFFECT, parse_settings

ROOT = Path(__file__).parents[2]


def test_defaults_satisfy_their_own_rules() -> None:
    defaults = {entry.name: entry.default for entry in fields(Settings)}
    assert Settings.from_values(defaults) == Settings()
    assert set(SPECIAL_TOKENS) < set(RULES)


def test_docs_hold_the_table_of_settings() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    table = text.partition("<!-- table -->\n")[2].partition("<!-- end of table -->")[0]
    assert table == render_table()
    assert all(f"`{name}`" in text for name in WITHOUT_EFFECT)


def test_options_are_typed_and_engine_args_win() -> None:
    values, warnings = parse_settings(
        ["parallel:8", "trust_remote_code:True", "tool_parser:hermes", "eos_token:007"],
        '{"parallel": 4, "max_queue": 10}',
    )
    assert warnings == []
    assert values == {
        "parallel": 4,
        "trust_remote_code": True,
        "tool_parser": "hermes",
        "eos_token": "007",
        "max_queue": 10,
    }
    settings = Settings.from_values(values)
    assert (settings.parallel, settings.max_queue, settings.stall_ms) == (4, 10, 250)
    assert settings.tokenizer_overrides == {"eos_token": "007"}


@pytest.mark.parametrize("text", ["auto", "AUTO"])
def test_auto_leaves_the_choice_to_the_device(text: str) -> None:
    chosen = {"prompt_cache_mib": None}
    assert parse_settings([f"prompt_cache_mib:{text}"], "")[0] == chosen
    assert parse_settings([], f'{{"prompt_cache_mib": "{text}"}}')[0] == chosen


def test_a_whole_number_may_be_written_as_a_decimal() -> None:
    assert parse_settings(["max_tokens:1e3"], "")[0] == {"max_tokens": 1000}
    assert parse_settings([], '{"max_tokens": 1e3}')[0] == {"max_tokens": 1000}


@pytest.mark.parametrize("typo", ["paralel:8", "Parallel:8"])
def test_unknown_option_is_one_warning_with_the_nearest_name(typo: str) -> None:
    values, warnings = parse_settings([typo], "")
    assert values == {}
    name = typo.partition(":")[0]
    assert warnings == [f"unknown option {name!r}; did you mean 'parallel'?"]


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_sampling_options_are_without_effect(name: str) -> None:
    values, warnings = parse_settings([f"{name}:0.5"], "")
    assert values == {}
    assert len(warnings) == 1
    assert warnings[0].startswith(f"option {name} has no effect here")
    with pytest.raises(InvalidRequest, match=f"EngineArgs key {name} has no effect here"):
        parse_settings([], f'{{"{name}": 0.5}}')


@pytest.mark.parametrize(
    ("options", "engine_args", "sentence"),
    [
        (["max_kv_size:512"], "", "option max_kv_size is not supported: a rotating context"),
        ([], '{"max_kv_size": 512}', "EngineArgs key max_kv_size is not supported"),
        (
            ["parallel:abc"],
            "",
            "option parallel must be a whole number from 1 to 256, but it is 'abc'",
        ),
        (["parallel:true"], "", "option parallel must be a whole number"),
        (["parallel:0"], "", "from 1 to 256, but it is 0"),
        (["parallel:7.5"], "", "from 1 to 256, but it is 7.5"),
        (["parallel:1_0"], "", "from 1 to 256, but it is '1_0'"),
        (["max_queue:auto"], "", "option max_queue must be a whole number"),
        (["prefill_chunk:99999"], "", "from 16 to 8192, or auto, but it is 99999"),
        (["trust_remote_code:1"], "", "trust_remote_code must be true or false, but it is 1"),
        (["dtype:int4"], "", "must be one of auto, float32, float16, bfloat16, but it is 'int4'"),
        ([], '{"paralel": 4}', "unknown EngineArgs key 'paralel'; did you mean 'parallel'?"),
        ([], '{"qqq": 4}', "unknown EngineArgs key 'qqq'; docs/options.md lists all settings"),
        ([], '{"parallel": "4"}', "EngineArgs key parallel must be a whole number"),
        ([], '{"parallel": true}', "from 1 to 256, but it is True"),
        ([], '{"parallel": null}', "from 1 to 256, but it is None"),
        ([], '{"stall_ms": NaN}', "EngineArgs key stall_ms must be a whole number"),
        ([], '{"parallel": 7.5}', "from 1 to 256, but it is 7.5"),
        (["xtc_threshold:true"], "", "must be a number from 0 to 1, but it is True"),
        ([], "{", "EngineArgs is not valid JSON: "),
        ([], "[" * 100_000, "EngineArgs is not valid JSON: "),
        ([], "[1]", "EngineArgs must be a JSON object of settings, but it is a list"),
    ],
)
def test_what_cannot_work_fails_the_load(
    options: list[str], engine_args: str, sentence: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_settings(options, engine_args)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("values", [{"paralel": 1}, {"parallel": 0}, {"parallel": "1"}])
def test_values_from_elsewhere_are_checked_again(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Settings.from_values(values)


@pytest.mark.parametrize(
    ("option", "field_value", "expected"),
    [
        ("auto", "", "auto"),
        ("auto", "half", "float16"),
        ("auto", " BF16 ", "bfloat16"),
        ("float32", "half", "float32"),
    ],
)
def test_dtype_setting_wins_over_the_field(option: str, field_value: str, expected: str) -> None:
    assert weight_dtype(Settings(dtype=option), field_value) == expected


def test_unknown_dtype_field_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="DType must be one of auto"):
        weight_dtype(Settings(), "fp8")


def test_settings_need_no_mlx() -> None:
    code = "import sys, backend.rpc.load_options; sys.exit('mlx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
