"""Options are typed by their looks, never lose their text, and never vanish without a word."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.options import did_you_mean, nearest, parse_options, shown, typed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("FALSE", False),
        ("16", 16),
        ("-3", -3),
        ("007", 7),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("", ""),
        ("hermes", "hermes"),
        ("1_000", "1_000"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("-Infinity", "-Infinity"),
        ("1e999", "1e999"),
        ("0x10", "0x10"),
        ("١٢", "١٢"),
    ],
)
def test_value_is_typed_by_its_looks(text: str, value: object) -> None:
    result = typed(text)
    assert result == value
    assert type(result) is type(value)


def test_entry_is_split_at_its_first_colon_and_stripped() -> None:
    options = parse_options([" hostfile : /a:b ", "eos_token:007"]).options
    assert options["hostfile"].value == "/a:b"
    assert (options["eos_token"].value, options["eos_token"].text) == (7, "007")


def test_last_entry_of_a_key_counts() -> None:
    assert parse_options(["a:1", "b:x", "a:2"]).options["a"].value == 2


def test_unusable_entries_are_reported() -> None:
    parsed = parse_options(["parallel", ":5", "", "ok:1"])
    assert list(parsed.options) == ["ok"]
    assert [warning.split(":")[0] for warning in parsed.warnings] == [
        "option 'parallel' has no colon",
        "option '",
        "option '' has no colon",
    ]
    assert "has no key" in parsed.warnings[1]


def test_nearest_key_ignores_case_and_dashes() -> None:
    known = ("parallel", "max_queue")
    assert nearest("Max-Queue", known) == "max_queue"
    assert nearest("paralel", known) == "parallel"
    assert nearest("zzz", known) is None
    assert did_you_mean("paralel", known) == "; did you mean 'parallel'?"
    assert did_you_mean("zzz", known) == ""


@given(st.lists(st.text()))
def test_every_entry_is_an_option_or_a_warning(entries: list[str]) -> None:
    parsed = parse_options(entries)
    keys = {entry.partition(":")[0].strip() for entry in entries if ":" in entry} - {""}
    assert set(parsed.options) == keys
    unusable = [entry for entry in entries if not entry.partition(":")[0].strip()]
    without_colon = [entry for entry in entries if ":" not in entry and entry not in unusable]
    assert len(parsed.warnings) == len(unusable) + len(without_colon)


@given(st.text())
def test_text_is_kept_as_written(text: str) -> None:
    option = parse_options([f"key:{text}"]).options["key"]
    assert option.text == text.strip()
    if isinstance(option.value, str):
        assert option.value == option.text
    else:
        assert math.isfinite(option.value)


@given(st.one_of(st.integers(-(10**30), 10**30), st.booleans(), st.floats(allow_nan=False)))
def test_printed_values_come_back(value: object) -> None:
    result = typed(str(value))
    assert result == (value if math.isfinite(value) else str(value))  # type: ignore[arg-type]


def test_long_values_are_cut_in_messages() -> None:
    assert len(shown("x" * 10_000)) == 80
