"""The table of tested families has a row for every result of the tests that it is made from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from backend.engine.loading.serving_trial import SEEING_ON_CPU, TEXT_ON_CPU, WAYS
from tests.architectures import known
from tests.architectures.shapes import UNBUILT, architectures

_REPORT = """<testsuites><testsuite>
<testcase name="test_answers_equal_those_of_plain_forward_passes[llama]"><properties>
<property name="way" value="in turn"/>
<property name="batched" value="True"/><property name="alone" value="True"/>
<property name="batch" value="True"/><property name="turns" value="True"/>
<property name="reused" value="True"/><property name="kept" value="False"/>
</properties></testcase>
<testcase name="test_answers_equal_those_of_plain_forward_passes[minimax_m3]"><properties>
<property name="way" value="in turn"/></properties></testcase>
<testcase name="test_answers_equal_those_of_plain_forward_passes[gpt2]"><properties>
<property name="way" value="shared"/></properties><failure/></testcase>
<testcase name="test_quantised_answers_equal_those_of_plain_forward_passes[llama]"/>
<testcase name="test_a_family_chooses_what_its_plain_passes_choose[pixtral]"><failure/></testcase>
<testcase name="test_a_family_chooses_what_its_plain_passes_choose[ministral3]"><properties>
<property name="model_type" value="mistral3"/><property name="way" value="in turn"/>
</properties></testcase>
<testcase name="test_a_family_chooses_what_its_plain_passes_choose[mistral4]"><properties>
<property name="model_type" value="mistral3"/><property name="way" value="shared"/>
</properties></testcase>
</testsuite></testsuites>"""


def test_each_result_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.xml").write_text(_REPORT)
    monkeypatch.setattr(sys, "argv", ["known", str(tmp_path / "models.xml")])
    known.main()
    written = capsys.readouterr().out
    assert "| llama | yes | yes | yes | yes | **no** | yes |\n" in written
    assert "| pixtral | **no** |\n" in written


def test_the_verdicts_are_those_of_families_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.xml").write_text(_REPORT)
    monkeypatch.setattr(sys, "argv", ["known", "verdicts", str(tmp_path / "models.xml")])
    known.main()
    tables = json.loads(capsys.readouterr().out)
    assert tables["text"] == {"llama": "in turn"}
    assert tables["seeing"] == {"mistral3": "in turn"}


def test_every_family_that_can_be_built_has_a_verdict() -> None:
    """After an update of mlx-lm, run `make test-models`."""
    assert TEXT_ON_CPU.keys() == set(architectures()) - UNBUILT.keys()
    assert {*TEXT_ON_CPU.values(), *SEEING_ON_CPU.values()} <= WAYS.keys()
