"""Each event is one line, whoever logs it, and no line has users' text."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from backend.engine.errors import InvalidRequest
from common import log_lines
from tests.log_text import untimed
from tests.rpc.client import failure_of
from tests.rpc.conftest import Running
from tests.rpc.fake_engine import FakeEngine
from tests.rpc.process import ROOT, WAIT
from tests.rpc.requests_of_hosts import model_options, predict_options
from wire import backend_pb2 as pb


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("word", "word"),
        ("/a/b-c:d", "/a/b-c:d"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "x"', '"say \\"x\\""'),
        ("a\nb\r\tc\x00\u2028", '"a\\nb\\r\\tc\\x00\\u2028"'),
        ("back\\slash", '"back\\\\slash"'),
        (True, "true"),
        (7, "7"),
        (1.26, "1.3"),
    ],
)
def test_values_stay_on_their_line(value: object, shown: str) -> None:
    assert log_lines.rendered(value) == shown


def lines_of(code: str, level: str = "") -> list[str]:
    program = f"from backend.rpc import logs\nlogs.configure({level!r})\n{code}"
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT
    )
    assert child.stdout == ""
    assert all(line.startswith("time=") for line in child.stderr.splitlines())
    return untimed(child.stderr).splitlines()


def record(text: str) -> logging.LogRecord:
    made = logging.LogRecord("backend", logging.INFO, "", 0, text, (), None)
    made.fields, made.created = {}, 7.25
    return made


def test_lines_that_do_not_fit_on_the_disk_are_counted() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = log_lines.LineWriter(descriptor)
    for _ in range(3):
        writer.emit(record("lost"))
    writer.flush()
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)  # there is room again
    writer.emit(record("seen"))
    assert untimed(os.read(reading, 1000).decode()) == (
        "level=info event=seen\nlevel=warning event=log_dropped lines=3\n"
    )
    for each in (writing, reading):
        os.close(each)


def test_a_full_pipe_that_does_not_block_loses_no_line() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = log_lines.LineWriter(writing)
    line = f"{log_lines.stamp(7.25)} level=info event={'x' * 5000}\n".encode()
    assert line.startswith(b"time=1970-01-01T00:00:07.250Z level=")
    for _ in range(100):
        writer.emit(record("x" * 5000))
    found = b""
    while len(found) < 100 * len(line):
        found += os.read(reading, 4096)
    assert found == line * 100


def test_garbage_that_logs_blocks_no_caller() -> None:
    """The garbage collector may run finalizers at any line, and asyncio's finalizers log."""
    reader, writer = os.pipe()
    handler = log_lines.LineWriter(writer)
    lines = 0

    class Garbage:
        def __del__(self) -> None:
            handler.handle(record("collected"))

    def collect(*_: Any) -> Any:
        nonlocal lines
        lines += 1
        Garbage()
        return collect

    def log() -> None:
        sys.settrace(collect)
        handler.handle(record("logged"))
        sys.settrace(None)

    thread = threading.Thread(target=log, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()
    handler.flush()
    found = os.read(reader, 1 << 20).decode()
    assert lines > 10
    assert (found.count("event=logged"), found.count("event=collected")) == (1, lines)


def test_levels() -> None:
    code = "logs.debug('d'); logs.info('i'); logs.warning('w'); logs.error('e')"
    names = ["debug", "info", "warning", "error"]
    for first, level in enumerate(names):
        wanted = [f"level={name} event={name[0]}" for name in names[first:]]
        assert lines_of(code, level) == wanted
    assert lines_of(code) == lines_of(code, " INFO ")


def test_an_unknown_level_is_reported_once() -> None:
    assert lines_of("", "loud") == [
        "level=warning event=log_level value=loud allowed=error,warning,info,debug"
    ]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            "import logging; logging.getLogger('lib').warning('a\\nb')",
            'level=warning event=log logger=lib message="a\\nb"',
        ),
        (
            "import logging; logging.getLogger('backend.engine').info('ready')",
            "level=info event=log logger=backend.engine message=ready",
        ),
        (
            "import sys; print('stray words', file=sys.stderr)",
            'level=info event=output text="stray words"',
        ),
        (
            "import sys; sys.stderr.write('10%\\r20%\\r'); sys.stderr.flush()",
            "level=info event=output text=10%\nlevel=info event=output text=20%",
        ),
        ("import warnings; warnings.warn('old')", ""),
        ("import logging; logging.getLogger('lib').info('chatter')", ""),
    ],
)
def test_lines_of_other_libraries_have_the_same_form(code: str, line: str) -> None:
    assert lines_of(code) == line.splitlines()


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('x\\ny')",
        "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
        "import logging\ntry: 1 / 0\nexcept Exception: logging.getLogger('l').exception('m')",
    ],
)
def test_a_traceback_is_one_line(code: str) -> None:
    (line,) = lines_of(code)
    assert line.startswith("level=error event=")
    assert 'traceback="  File' in line


def test_a_long_exception_is_cut() -> None:
    assert len(log_lines.traceback_of(ValueError("x" * 10_000))) < 500


SECRET = "the user's very own words"


@pytest.fixture
def captured(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "backend")
    return caplog


def call_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record)["fields"] for record in caplog.records if record.msg == "call"]


def test_a_request_ends_in_one_line_with_its_counts(
    running: Running, captured: pytest.LogCaptureFixture
) -> None:
    list(running.stub.PredictStream(predict_options(CorrelationId="job-7")))
    running.close_calls()
    (line,) = call_lines(captured)
    assert str(line.pop("id")).startswith("job-7.")
    assert isinstance(line.pop("ms"), float)
    assert line == {
        "rpc": "PredictStream",
        "status": "OK",
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "completion_tokens": 2,
        "finish": "stop",
    }


def test_probes_are_logged_only_at_debug_level(
    running: Running, captured: pytest.LogCaptureFixture
) -> None:
    running.stub.Health(pb.HealthMessage())
    running.close_calls()
    assert {record.levelno for record in captured.records if record.msg == "call"} == {
        logging.DEBUG
    }


def test_no_line_repeats_what_a_user_wrote(
    running: Running, engine: FakeEngine, captured: pytest.LogCaptureFixture
) -> None:
    secret = pb.Message(role="user", content=SECRET, tool_calls=f'[{{"id": "{SECRET}"}}]')
    requests = [
        predict_options(Prompt=SECRET),
        predict_options(Messages=[secret], Metadata={"note": SECRET}),
        predict_options(Tools=SECRET),
        predict_options(Grammar=SECRET),
        predict_options(LogitBias=SECRET),
        predict_options(StopPrompts=[SECRET], CorrelationId=SECRET),
        predict_options(Messages=[secret, pb.Message(role="user", tool_calls=SECRET)]),
        predict_options(Metadata={"chat_template_kwargs": SECRET}, Messages=[secret]),
    ]
    for fault in (None, InvalidRequest("refused"), RuntimeError("broken")):
        engine.fault = fault
        for request in requests:
            try:
                running.stub.Predict(request)
            except grpc.RpcError:
                continue
    running.stub.LoadModel(model_options())
    running.close_calls()
    formatter = logging.Formatter("%(message)s")
    assert len(call_lines(captured)) == 3 * len(requests) + 1
    for record in captured.records:
        assert SECRET not in formatter.format(record) + str(vars(record).get("fields"))


def test_a_wrong_token_is_logged_once_and_never_shown(
    guarded: Running, captured: pytest.LogCaptureFixture
) -> None:
    metadata = (("authorization", "Bearer wrong-token"),)
    for _ in range(3):
        failure_of(lambda: guarded.stub.Health(pb.HealthMessage(), metadata=metadata))
    refusals = [record for record in captured.records if record.msg == "refused"]
    assert [record.levelno for record in refusals] == [logging.WARNING, *[logging.DEBUG] * 2]
    assert "wrong-token" not in str([vars(record) for record in captured.records])


def test_an_internal_error_leaves_its_traceback_in_the_log(
    running: Running, engine: FakeEngine, captured: pytest.LogCaptureFixture
) -> None:
    engine.fault = RuntimeError("broken")
    failure_of(lambda: running.stub.Predict(predict_options()))
    running.close_calls()
    (line,) = call_lines(captured)
    assert line["status"] == "INTERNAL"
    assert "fake_engine.py" in str(line["traceback"])


def test_a_call_that_is_gone_when_something_is_sent_in_it_counts_as_cancelled(
    running: Running, engine: FakeEngine, captured: pytest.LogCaptureFixture
) -> None:
    """gRPC raises this error if the client has just reset the call."""
    engine.fault = grpc.aio.InternalError("Failed grpc_call_start_batch: 8")
    failure_of(lambda: running.stub.Predict(predict_options()))
    running.close_calls()
    (line,) = call_lines(captured)
    assert line["status"] == "CANCELLED"
    assert "traceback" not in line
