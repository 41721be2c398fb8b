"""A run ends with a line about the tests that it left out."""

from __future__ import annotations

import sys

from tests.install.shell import ROOT, clean_environment, shell
from tests.skipped import left_out


def test_reasons_are_counted_by_what_is_missing() -> None:
    reasons = ["Skipped: no Chromium with chromedriver on PATH"] * 53
    reasons += ["Skipped: npm is not on PATH", "Skipped: a Mac needs no extra"]
    reasons += ["Skipped: part of make test-long"]
    assert left_out(reasons) == (
        "Skipped: 53 for lack of a browser (apt-get install chromium chromium-driver);"
        " 1 for lack of npm (apt-get install npm);"
        " 1 for lack of time (make test-long);"
        " 1 for other reasons (listed above)"
    )


def test_nothing_is_said_if_nothing_was_skipped() -> None:
    assert left_out([]) == ""


def test_the_line_is_the_last_before_the_result() -> None:
    """Of a real run, in two processes, of a test whose program is not there."""
    ran = shell(
        *(ROOT / "scripts" / "python", "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"),
        *("tests/rpc/test_reflection.py", "-k", "grpcurl"),
        environment=clean_environment(GRPCURL="", PATH=f"{sys.prefix}/bin:/usr/bin:/bin"),
    )
    line, result = ran.stdout.strip().splitlines()[-2:]
    assert "1 skipped" in result, ran.stdout
    assert line.startswith("Skipped: 1 for lack of grpcurl (go install ")
