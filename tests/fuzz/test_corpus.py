"""Inputs that fuzzing has found, and a few more, for every target of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS
from tests.long import examples

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(CORPUS.glob("*/*"))


def test_every_target_has_seeds() -> None:
    assert {path.parent.name for path in INPUTS} == set(TARGETS)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_any_input(name: str, data: st.DataObject) -> None:
    seeds = [path.read_bytes() for path in INPUTS if path.parent.name == name]
    text, at = data.draw(st.sampled_from(seeds)), data.draw(st.integers(0, 200))
    TARGETS[name](text[:at] + data.draw(st.binary(max_size=40)) + text[at + 1 :])
