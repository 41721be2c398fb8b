"""A host's settings are validated at load time; a bad one fails the load with a message."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.errors import InvalidRequest
from backend.engine.settings import Settings
from backend.rpc.load_options import OPTIONS, parse_settings, split_options

DOCUMENT = Path(__file__).parents[2] / "docs" / "options.md"


def test_entry_is_split_at_its_first_colon_and_stripped() -> None:
    given, warnings = split_options([" hostfile : /a:b ", "eos_token:007"])
    assert given == {"hostfile": "/a:b", "eos_token": "007"}
    assert warnings == []


def test_the_last_entry_of_a_key_wins() -> None:
    assert split_options(["a:1", "b:x", "a:2"])[0] == {"a": "2", "b": "x"}


def test_unusable_entries_are_reported() -> None:
    given, warnings = split_options(["parallel", ":5", "", "ok:1"])
    assert given == {"ok": "1"}
    assert [warning.partition(": ")[0] for warning in warnings] == [
        "option 'parallel' has no colon",
        "option ':5' has no key",
        "option '' has no colon",
    ]


@given(st.lists(st.text()))
def test_every_entry_is_an_option_or_a_warning(entries: list[str]) -> None:
    given, warnings = split_options(entries)
    usable = [entry for entry in entries if entry.partition(":")[0].strip() and ":" in entry]
    assert given == {
        entry.partition(":")[0].strip(): entry.partition(":")[2].strip() for entry in usable
    }
    assert len(warnings) == len(entries) - len(usable)


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
def test_an_unknown_option_is_one_warning_with_the_nearest_name(typo: str) -> None:
    values, warnings = parse_settings([typo], "")
    assert values == {}
    name = typo.partition(":")[0]
    assert warnings == [f"unknown option {name!r}; did you mean 'parallel'?"]


@pytest.mark.parametrize("name", sorted(OPTIONS.neutral))
def test_sampling_options_have_no_effect(name: str) -> None:
    values, warnings = parse_settings([f"{name}:0.5"], "")
    assert values == {}
    assert len(warnings) == 1
    assert warnings[0].startswith(f"option {name} has no effect here")
    with pytest.raises(InvalidRequest, match=f"EngineArgs key {name} has no effect here"):
        parse_settings([], f'{{"{name}": 0.5}}')


@pytest.mark.parametrize(
    ("options", "engine_args", "sentence"),
    [
        (
            ["max_kv_size:512"],
            "",
            "option max_kv_size is not supported, because a rotating KV cache",
        ),
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
def test_impossible_settings_fail_the_load(
    options: list[str], engine_args: str, sentence: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_settings(options, engine_args)
    assert sentence in str(refusal.value)


def test_docs_name_the_options_without_effect() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in OPTIONS.neutral)
