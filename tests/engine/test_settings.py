"""Settings are validated at load time; a bad one fails the load with a message."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from backend.engine.errors import InvalidRequest
from backend.engine.settings import RULES, SPECIAL_TOKENS, Settings, render_table, weight_dtype

ROOT = Path(__file__).parents[2]


def test_defaults_satisfy_their_own_rules() -> None:
    defaults = {entry.name: entry.default for entry in fields(Settings)}
    assert Settings.from_values(defaults) == Settings()
    assert set(SPECIAL_TOKENS) < set(RULES)


def test_the_docs_contain_the_table_of_settings() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    table = text.partition("<!-- table -->\n")[2].partition("<!-- end of table -->")[0]
    assert table == render_table()


@pytest.mark.parametrize("values", [{"paralel": 1}, {"parallel": 0}, {"parallel": "1"}])
def test_values_from_other_sources_are_validated_too(values: dict[str, Any]) -> None:
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
def test_the_dtype_setting_wins_over_the_field(
    option: str, field_value: str, expected: str
) -> None:
    assert weight_dtype(Settings(dtype=option), field_value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("on", True), ("Off", False), ("auto", None), (True, True), (False, False), (None, None)],
)
def test_flags_are_also_on_and_off(value: Any, expected: bool | None) -> None:
    assert Settings.from_values({"mtp": value}).mtp is expected


def test_unknown_dtype_field_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="DType must be one of auto"):
        weight_dtype(Settings(), "fp8")


def test_settings_do_not_need_mlx() -> None:
    code = "import sys, backend.rpc.load_options; sys.exit('mlx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
