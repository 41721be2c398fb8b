"""The gateway's log: one form for its own lines and those of its backends.

Covers: gateway/logs.py, gateway/supervisor/process.py
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.gateway.asking import chat
from tests.gateway.gateway_process import ROOT, WAIT, GatewayProcess, tiny
from tests.log_text import untimed

OF_BACKEND = "time=2026-11-28T10:00:00.000Z level=warning event=log message=hot"


def passed_on(line: str) -> str:
    program = f"from gateway import logs\nlogs.configure('')\nlogs.pass_on('a b', {line!r})"
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT
    )
    return child.stderr.rstrip("\n")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (OF_BACKEND, OF_BACKEND.replace("warning event", 'warning backend="a b" event')),
        ("plain words", 'level=info event=output backend="a b" text="plain words"'),
        (
            f"{OF_BACKEND}\x1b[2J",
            f'level=info event=output backend="a b" text="{OF_BACKEND}\\x1b[2J"',
        ),
        (OF_BACKEND.replace("warning", "debug"), ""),
    ],
)
def test_a_line_of_a_backend_is_passed_on(line: str, shown: str) -> None:
    assert untimed(passed_on(line)) == untimed(shown)


def test_no_line_is_inside_another() -> None:
    gateway = GatewayProcess({"tiny": tiny()})
    try:
        chat(gateway)
        gateway.line_with("event=request")
        gateway.line_with("backend=tiny event=call rpc=PredictStream")
    finally:
        gateway.close()
    form = r"(time=\S+Z level=\w+ (backend=tiny )?event=(?!.*level=)|gateway: )"
    assert [line for line in gateway.log if not re.match(form, line)] == []
    assert any(line.startswith("gateway: chat page: http://") for line in gateway.log)
