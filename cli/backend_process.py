"""Starts a backend process without a gateway, for the demo, doctor and benchmarks."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import environ
from typing import IO, Any

import grpc
from grpc.experimental import ChannelOptions

from cli import default_model
from common.child_environment import backend_environ
from common.launch import command
from common.process_end import end_of, wait_or_kill
from common.user_path import user_path
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

CONTEXT_SIZE = 4096
STOP_SECONDS = 15.0
_END_SECONDS = 2.0  # how long a backend may take to end after its connection is lost


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def options_for(
    model: str, report: Callable[[str], None] = default_model.report_on_stderr
) -> pb.ModelOptions:
    """Return the LoadModel request for a model. Raises ModelUnavailable.

    model: a folder or a hub id; "" for the default model.
    report: called with a message for each stage of the default model's download.
    """
    reference = model or str(default_model.ensure(report))
    options = pb.ModelOptions(Model=reference, ContextSize=CONTEXT_SIZE)
    local = user_path(reference)
    if local.exists():
        options.Model, options.ModelFile = local.absolute().name, str(local.absolute())
    return options


def until_health(child: subprocess.Popen[bytes], port: int) -> backend_pb2_grpc.BackendStub:
    """Return a stub once a backend answers Health. Raises RuntimeError if the process ends."""
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


def failure_of(error: grpc.RpcError, child: subprocess.Popen[bytes]) -> str:
    """Return why a call failed: how the backend process ended or, if it runs, the call's status."""
    failed: Any = error
    if failed.code() is grpc.StatusCode.UNAVAILABLE:
        with suppress(subprocess.TimeoutExpired):
            return end_of("the backend", child.wait(_END_SECONDS))
    return f"{failed.code().name}: {failed.details()}"


def environment_of(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a backend process.

    This is the environment of this process, without the changes of its start script and without the
    token of a host, because a backend with a token would refuse calls without it.

    extra: variables to add.
    """
    found = backend_environ(environ, {})
    for name in ("OPENBLAS_NUM_THREADS", "LOCALAI_GRPC_AUTH_TOKEN"):
        found.pop(name, None)
    return found | dict(extra)


@contextmanager
def process(
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
    port: int | None = None,
    module: str = "backend",
    arguments: Sequence[str] = (),
) -> Iterator[tuple[subprocess.Popen[bytes], backend_pb2_grpc.BackendStub]]:
    """Run a backend until the block ends; yields its process and a stub.

    environment: variables to add to its environment.
    port: None for a free port.
    module: the module to run, with `arguments`.
    """
    port = port or free_port()
    child = subprocess.Popen(
        command("-m", module, "--addr", f"127.0.0.1:{port}", *arguments),
        env=environment_of({"MLX_BACKEND_LOG": "error", **(environment or {})}),
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )
    try:
        yield child, until_health(child, port)
    finally:
        child.terminate()
        wait_or_kill(child, STOP_SECONDS)
