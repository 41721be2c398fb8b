"""Messages suggest the word that was meant, and quote no more than fits."""

import json
from typing import cast

import pytest

from common.wording import did_you_mean, json_fault, nearest, shown


def test_nearest_key_ignores_case_and_dashes() -> None:
    known = ("parallel", "max_queue")
    assert nearest("Max-Queue", known) == "max_queue"
    assert nearest("paralel", known) == "parallel"
    assert nearest("zzz", known) is None
    assert nearest("a" * 300, ["a" * 300]) is None  # the search takes time
    assert did_you_mean("paralel", known) == "; did you mean 'parallel'?"
    assert did_you_mean("zzz", known) == ""


def test_long_values_are_cut_in_messages() -> None:
    assert len(shown("x" * 10_000)) == 80


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "its lists and objects are nested too deeply"),
        ("9" * 5000, "it has a whole number of more than 4300 digits"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_json_errors_are_described_in_words(text: str, why: str) -> None:
    with pytest.raises((ValueError, RecursionError)) as caught:
        json.loads(text)
    assert json_fault(cast(ValueError, caught.value)) == why
