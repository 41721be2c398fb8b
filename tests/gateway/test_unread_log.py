"""The gateway works if nobody reads its log."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from tests.gateway.gateway_process import ROOT, WAIT
from tests.polling import until

SMALLEST_PIPE = 4096


def test_no_socket_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Otherwise log lines would be written into the socket."""
    places = f"--models-dir {tmp_path} --port 0"
    gateway = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$0" -m gateway {places} <&- 2>&-', sys.executable],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        process = psutil.Process(gateway.pid)
        until(lambda: process.net_connections("tcp"))
        assert all(connection.fd > 2 for connection in process.net_connections("all"))
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(WAIT) == 0
    finally:
        gateway.kill()
        gateway.wait(WAIT)


def test_a_full_log_pipe_blocks_no_request_and_dropped_lines_are_counted(tmp_path: Path) -> None:
    gateway = subprocess.Popen(
        [
            *(sys.executable, "-m", "gateway", "--models-dir", str(tmp_path), "--port", "0"),
            "--forget-prompts",
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert gateway.stderr is not None
    pipe, read = gateway.stderr.fileno(), b""
    try:
        if sys.platform == "linux":
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
        while (match := re.search(rb"listening on (\S+)\n", read)) is None:
            some = os.read(pipe, 4096)
            assert some, read
            read += some
        with httpx.Client(base_url=match[1].decode(), timeout=WAIT, trust_env=False) as client:
            for _ in range(1500):
                assert client.get("/v1/models/none").status_code == 404
        while b"event=log_dropped" not in read:
            read += os.read(pipe, 4096)
        gateway.send_signal(signal.SIGTERM)
        read += gateway.stderr.read()
        assert gateway.wait(WAIT) == 0
    finally:
        gateway.kill()
        gateway.wait(WAIT)
        gateway.stderr.close()
