"""The backend as a host runs it: run.sh in a process of its own, called over a socket."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.acceptance import confined
from tests.log_text import untimed
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

ROOT = Path(__file__).parents[2]
TINY_TEXT = ROOT / "tests" / "models" / "tiny_text"
WAIT = 240.0  # seconds, on a busy machine too


class Backend:
    """A running backend; `stub` calls it; `log` has what it wrote to stderr.

    program: what starts it. limits: arguments of `confined`, which then starts it. arguments: those
    after --addr.
    """

    def __init__(
        self,
        limits: Sequence[str] = (),
        arguments: Sequence[str] = (),
        program: Sequence[str] = (str(ROOT / "run.sh"),),
        **environ: str,
    ) -> None:
        self.log: list[str] = []
        self._held: tuple[Path, dict[str, Any]] | None = None
        self._bound = threading.Event()
        command = [*program, "--addr", "127.0.0.1:0", *arguments]
        if limits:
            command = [sys.executable, confined.__file__, *limits, "--", *command]
        self.child = subprocess.Popen(
            command,
            cwd="/",
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._bound.wait(WAIT) or self.port == 0:
            self.child.kill()
            self.child.wait(WAIT)
            raise AssertionError(f"the backend did not start: {self.log}")
        self.channel = self.connect()
        self.stub = backend_pb2_grpc.BackendStub(self.channel)

    def _read(self) -> None:
        assert self.child.stderr is not None
        self.port = 0
        with self.child.stderr as lines:
            for line in lines:
                self.log.append(untimed(line.rstrip()))
                match = re.search(r"event=listening addr=\S+:(\d+)", line)
                if match:
                    self.port = int(match[1])
                    self._bound.set()
        self._bound.set()

    def connect(self) -> grpc.Channel:
        """A channel of its own: hosts open one for every call."""
        return grpc.insecure_channel(
            f"127.0.0.1:{self.port}",
            options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )

    def load(self, model: Path = TINY_TEXT, timeout: float = WAIT, **options: Any) -> pb.Result:
        options.setdefault("ContextSize", 4096)
        self._held = None
        request = pb.ModelOptions(Model=model.name, ModelFile=str(model), **options)
        result: pb.Result = self.stub.LoadModel(request, timeout=timeout)
        self._held = (model, options)
        return result

    def free(self) -> None:
        self._held = None
        assert self.stub.Free(pb.HealthMessage(), timeout=WAIT).success

    def holding(self, model: Path, **options: Any) -> Backend:
        """Load a model, unless it was the last one that was loaded in this way."""
        if self._held != (model, {"ContextSize": 4096, **options}):
            assert self.load(model, **options).success
        return self

    def memory(self) -> int:
        """Bytes that MLX holds, as Status reports them."""
        status: pb.StatusResponse = self.stub.Status(pb.HealthMessage(), timeout=WAIT)
        return status.memory.breakdown["mlx_active"]

    def process(self) -> psutil.Process:
        return psutil.Process(self.child.pid)

    def idle(self) -> bool:
        status = self.stub.Status(pb.HealthMessage(), timeout=WAIT)
        return bool(status.state == pb.StatusResponse.READY)

    def close(self) -> int:
        self.channel.close()
        self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(WAIT)
        finally:
            self.child.kill()
            self._reader.join(WAIT)


def threads_of(process: psutil.Process) -> int:
    """The number of threads; on Linux without those of gRPC's pool, which grows under load."""
    names = []
    for name in Path(f"/proc/{process.pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            names.append(name.read_text())
    return sum(name != "event_engine\n" for name in names) or process.num_threads()


def chat(*turns: str, **fields: Any) -> pb.PredictOptions:
    """A chat request whose messages alternate between user and assistant.

    Greedy unless `fields` say otherwise.
    """
    roles = ("user", "assistant")
    messages = [pb.Message(role=roles[place % 2], content=turn) for place, turn in enumerate(turns)]
    fields.setdefault("Metadata", {"enable_thinking": "false"})
    return pb.PredictOptions(Messages=messages, UseTokenizerTemplate=True, **fields)


def text_of(replies: Iterator[pb.Reply]) -> str:
    return b"".join(reply.message for reply in replies).decode()


def text_answer(backend: Backend, request: pb.PredictOptions) -> str:
    """The text of a whole answer."""
    reply: pb.Reply = backend.stub.Predict(request, timeout=WAIT)
    return reply.message.decode()


def refusal(backend: Backend, request: pb.PredictOptions) -> str:
    """The message of the INVALID_ARGUMENT with which the request must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        backend.stub.Predict(request, timeout=WAIT)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())
