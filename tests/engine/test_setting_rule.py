"""A setting's text is converted by its form, and a value is accepted only in the right type."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.engine.setting_rule import Rule, parse_scalar


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
def test_a_value_s_type_follows_from_its_form(text: str, value: object) -> None:
    result = parse_scalar(text)
    assert result == value
    assert type(result) is type(value)


@given(st.text())
def test_a_text_that_is_no_value_stays_as_written(text: str) -> None:
    value = parse_scalar(text)
    assert value == text if isinstance(value, str) else math.isfinite(value)


@given(st.one_of(st.integers(-(10**30), 10**30), st.booleans(), st.floats(allow_nan=False)))
def test_printed_values_are_read_back(value: object) -> None:
    result = parse_scalar(str(value))
    assert result == (value if math.isfinite(value) else str(value))  # type: ignore[arg-type]


SHARE = Rule(float, 0.5, "", 0, 1)
COUNT = Rule(int, None, "", 1, 9)
WORD = Rule(str, "a", "", choices=("a", "b"))
FLAG = Rule(bool, False, "")
TEXT = Rule(str, "", "")


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        (SHARE, "1", 1.0),
        (COUNT, "7.0", 7),
        (COUNT, "Auto", None),
        (WORD, " B ", "b"),
        (FLAG, "True", True),
        (TEXT, "007", "007"),
        (TEXT, "auto", "auto"),
    ],
)
def test_a_text_is_read_as_the_type_of_its_setting(rule: Rule, text: str, value: object) -> None:
    read = rule.read(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("rule", "value", "expected"),
    [
        (SHARE, 1.5, "a number from 0 to 1"),
        (SHARE, 10**400, "a number from 0 to 1"),
        (SHARE, math.nan, "a number from 0 to 1"),
        (SHARE, True, "a number from 0 to 1"),
        (SHARE, "auto", "a number from 0 to 1"),
        (SHARE, None, "a number from 0 to 1"),
        (COUNT, 0, "a whole number from 1 to 9, or auto"),
        (COUNT, math.inf, "a whole number from 1 to 9, or auto"),
        (COUNT, True, "a whole number from 1 to 9, or auto"),
        (WORD, "c", "one of a, b"),
        (FLAG, 1, "true or false"),
        (TEXT, 7, "text"),
    ],
)
def test_another_value_is_refused_with_what_is_expected(
    rule: Rule, value: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"^{expected}$"):
        rule.check(value)


@given(st.sampled_from([SHARE, COUNT, WORD, FLAG, TEXT]), st.text())
def test_any_text_is_read_or_refused(rule: Rule, text: str) -> None:
    try:
        value = rule.read(text)
    except ValueError:
        return
    assert rule.check(value) == value
