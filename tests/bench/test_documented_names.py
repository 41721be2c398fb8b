"""Every measurement that a document or an issue template names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.process import ROOT

PLACES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"))


def test_documents_name_measurements_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ensure", Path)  # no model is needed to list the names
    known = bench.measurements().keys()
    text = "\n".join(path.read_text() for path in PLACES)
    named = re.findall(r'BENCH=(?:"([^"]+)"|([\w:-]+))', text)
    names = {name for quoted, bare in named for name in (quoted or bare).split()}
    assert "prefix" in names
    assert names <= known
