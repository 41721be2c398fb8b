"""Starts a backend process to ask and to measure, without a gateway."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import environ
from typing import IO

import grpc
from grpc.experimental import ChannelOptions

from common.launch import command
from common.process_end import end_of
from gateway.supervisor.warden import backend_environ
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_health(child: subprocess.Popen[bytes], port: int) -> backend_pb2_grpc.BackendStub:
    """Wait for the port, then for Health. Raises RuntimeError if the child died."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            if child.poll() is not None:
                raise RuntimeError(end_of("the backend", child.returncode)) from None
            time.sleep(0.002)
    channel = grpc.insecure_channel(
        f"127.0.0.1:{port}",
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            # Otherwise the client needs more time per token of a small model than the backend.
            (ChannelOptions.SingleThreadedUnaryStream, 1),
        ],
    )
    stub = backend_pb2_grpc.BackendStub(channel)
    if stub.Health(pb.HealthMessage(), timeout=10).message != b"OK":
        raise RuntimeError("Health is not OK")
    return stub


def environment_of(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without the changes of its start script.

    extra: variables to add.
    """
    found = backend_environ(environ, {})
    found.pop("OPENBLAS_NUM_THREADS", None)
    return found | dict(extra)


@contextmanager
def process(
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
    port: int | None = None,
    module: str = "backend",
) -> Iterator[tuple[subprocess.Popen[bytes], backend_pb2_grpc.BackendStub]]:
    """Start a backend, on a free port without `port`; yields its process and a stub."""
    port = port or free_port()
    child = subprocess.Popen(
        command("-m", module, "--addr", f"127.0.0.1:{port}"),
        env=environment_of({"MLX_BACKEND_LOG": "error", **(environment or {})}),
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )
    try:
        yield child, until_health(child, port)
    finally:
        child.terminate()
        child.wait()
