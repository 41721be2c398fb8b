"""The backend works if nobody reads its log, or its standard streams are closed."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.acceptance.backend import ROOT, TINY_TEXT
from tests.log_text import untimed
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

WAIT = 240.0  # seconds, on a busy machine too
NOTHING = pb.HealthMessage()
SMALLEST_PIPE = 4096


class Unread:
    """A backend whose stderr is read only up to the line that names its port."""

    def __init__(self, *, closed: str = "") -> None:
        self.child = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$0" -m backend --addr 127.0.0.1:0 {closed}', sys.executable],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self.child.stderr is not None
        self.pipe = self.child.stderr
        if sys.platform == "linux":
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
        self.read = b""
        while (match := re.search(rb"addr=\S+:(\d+).*\n", self.read)) is None:
            some = os.read(self.pipe.fileno(), 4096)
            assert some, self.read
            self.read += some
        self.channel = grpc.insecure_channel(f"127.0.0.1:{int(match[1])}")
        self.stub = BackendStub(self.channel)

    def end(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(WAIT)


@contextmanager
def unread(closed: str = "") -> Iterator[Unread]:
    backend = Unread(closed=closed)
    try:
        yield backend
    finally:
        backend.channel.close()
        backend.child.kill()
        backend.child.wait()
        backend.pipe.close()


def test_a_full_log_pipe_blocks_nothing_and_dropped_lines_are_counted() -> None:
    with unread() as backend:
        for _ in range(1500):
            backend.stub.Free(NOTHING, timeout=WAIT)
        model = pb.ModelOptions(Model="tiny", ModelFile=str(TINY_TEXT))
        backend.stub.LoadModel(model, timeout=WAIT)
        while b"lines=" not in backend.read:
            backend.read += os.read(backend.pipe.fileno(), 4096)
        dropped = int(re.findall(rb"event=log_dropped lines=(\d+)", backend.read)[0])
        assert dropped + backend.read.count(b"event=call rpc=Free") in range(1450, 1520)
        for _ in range(1500):
            backend.stub.Free(NOTHING, timeout=WAIT)
        backend.stub.Health(NOTHING, timeout=WAIT)
        assert backend.end() == 0


def test_the_last_line_is_written_before_the_exit() -> None:
    with unread() as backend:
        backend.child.send_signal(signal.SIGTERM)
        backend.read += backend.pipe.read()
        assert backend.child.wait(WAIT) == 0
        assert untimed(backend.read.decode()).splitlines()[-1] == "level=info event=stopped"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_closed_standard_streams_do_not_block(closed: str) -> None:
    with unread(closed) as backend:
        backend.stub.Health(NOTHING, timeout=WAIT)
        assert backend.end() == 0
        assert b"Traceback" not in backend.read + backend.pipe.read()


def test_a_closed_log_pipe_does_not_block() -> None:
    with unread() as backend:
        backend.pipe.close()
        for _ in range(3):
            backend.stub.Free(NOTHING, timeout=WAIT)
        assert backend.end() == 0
