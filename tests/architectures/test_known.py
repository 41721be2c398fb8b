"""The table of tested families has a row for every result of the tests that it is made from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.architectures import known

_REPORT = """<testsuites><testsuite>
<testcase name="test_answers_equal_those_of_plain_forward_passes[llama]"><properties>
<property name="batched" value="True"/><property name="alone" value="True"/>
<property name="batch" value="True"/><property name="turns" value="True"/>
<property name="reused" value="True"/><property name="kept" value="False"/>
</properties></testcase>
<testcase name="test_quantised_answers_equal_those_of_plain_forward_passes[llama]"/>
<testcase name="test_a_family_chooses_what_its_plain_passes_choose[pixtral]"><failure/></testcase>
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
