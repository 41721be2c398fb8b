"""When the parent watch is active, and how often it checks."""

from __future__ import annotations

import pytest

from backend.rpc.parent_watch import SWITCH, interval_of, should_watch


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("3s", 3.0),
        ("2m", 120.0),
        ("1.5", 1.5),
        (" 4 S ", 4.0),
        ("", 2.0),
        ("0", 2.0),
        ("-1s", 2.0),
        ("soon", 2.0),
        ("nan", 2.0),
        ("inf", 2.0),
        ("1h", 2.0),
    ],
)
def test_intervals(text: str, seconds: float) -> None:
    assert interval_of(text) == seconds


@pytest.mark.parametrize("value", ["false", "0", "no", "off", "OFF", " False "])
def test_it_can_be_switched_off(value: str) -> None:
    assert not should_watch({SWITCH: value}, 4242)


@pytest.mark.parametrize("value", ["", "true", "1", "anything"])
def test_it_is_on_in_all_other_cases(value: str) -> None:
    assert should_watch({SWITCH: value}, 4242)


@pytest.mark.parametrize("parent", [0, 1])
def test_there_is_nothing_to_watch_under_init(parent: int) -> None:
    assert not should_watch({}, parent)
