"""Values in JSON and its dialects become JSON text, unchanged if possible."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.formats.json_text import json_string
from common.formats.values import (
    GEMMA4,
    JSON,
    MODEL_JSON,
    PYTHON,
    PYTHON_JSON,
    Dialect,
    as_json,
    parts,
    string_of,
)


@pytest.mark.parametrize(
    ("dialect", "text", "expected"),
    [
        (JSON, ' {"a": 1} ', '{"a": 1}'),
        (JSON, '{"a":1e400,"b":-0.0}', '{"a":1e400,"b":-0.0}'),
        (JSON, '{"a": [1, 2,],}', '{"a": [1, 2]}'),
        (JSON, '"a\nb\\q\\u12"', '"a\\nb\\\\q\\\\u12"'),
        (JSON, "{'a': 1}", None),
        (JSON, '{"a" 1}', None),
        (JSON, '{"a": 01}', None),
        (JSON, "[1 2]", None),
        (JSON, "NaN", None),
        (JSON, "{} {}", None),
        (JSON, "", None),
        (PYTHON, "{'a': (1, None), \"b\": True}", '{"a": [1, null], "b": true}'),
        (PYTHON, "['it\\'s \\x41\\u00e9\\n']", '["it\'s Aé\\n"]'),
        (PYTHON, "['''a'b''', '']", '["a\'b", ""]'),
        (PYTHON, "[__import__('os')]", "[\"__import__('os')\"]"),
        (PYTHON_JSON, "{'a': None, \"b\": true}", '{"a": null, "b": true}'),
        (PYTHON_JSON, "[see chapter 1]", None),
        (GEMMA4, '{a:<|"|>}"<|"|>,b:[x y,1.]}', '{"a": "}\\"", "b": ["x y", 1.0]}'),
        (
            replace(GEMMA4, fence="<escape>"),
            "{a:<escape>{<escape>,b:False}",
            '{"a": "{", "b": false}',
        ),
    ],
)
def test_as_json(dialect: Dialect, text: str, expected: str | None) -> None:
    assert as_json(text, dialect) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(value=VALUES, indent=st.sampled_from([None, 2]))
def test_json_is_kept_unchanged(value: object, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert as_json(text) == text


@given(value=VALUES)
def test_python_values_are_parsed(value: object) -> None:
    text = as_json(repr([value]), PYTHON)
    assert text is not None
    assert json.loads(text) == [value]


@given(members=st.dictionaries(st.text(), VALUES))
def test_parts_of_an_object(members: dict[str, object]) -> None:
    found = parts(json.dumps(members))
    assert {key: json.loads(value) for key, value in found} == members


@given(items=st.lists(VALUES))
def test_parts_of_a_list(items: list[object]) -> None:
    assert [json.loads(value) for _, value in parts(json.dumps(items))] == items


def test_a_string_that_no_encoding_can_represent_is_escaped() -> None:
    assert json_string("a\ud83d") == '"a\\ud83d"'
    assert json_string("é😀") == '"é😀"'


def test_string_of() -> None:
    assert string_of('"a\\n"') == "a\n"
    assert string_of("1") is None


def test_numbers_of_models_keep_their_digits_and_whether_they_have_a_point() -> None:
    written = {"2.": "2.0", ".5": "0.5", "+1": "1", "2.e3": "2e3", "-.50": "-0.50"}
    found = {text: as_json(f"[{text}]", MODEL_JSON) for text in written}
    assert found == {text: f"[{number}]" for text, number in written.items()}
    others = ("012", "0x1F", "1_000", ".", "-", "e0", "1.2.3")
    found = {text: as_json(f"[{text}]", MODEL_JSON) for text in others}
    assert found == {text: f'["{text}"]' for text in others}
