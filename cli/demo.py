"""Runs `make demo`: one question to a real model, over the wire, as a host would ask it.

It starts the backend through run.sh, waits for Health, loads a model, streams the answer, frees the
model and stops the process. It shares no code with the backend except backend.proto, and the
description of how a process ended.
"""

import codecs
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc

from cli import default_model
from common.machine_memory import kills_for_memory
from common.process_end import end_of, tells_fault
from wire import backend_pb2, backend_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PROMPT = "What is the capital of France?"
CONTEXT_SIZE = 4096
MOST_TOKENS = 256

START_SECONDS = 60.0
STOP_SECONDS = 15.0
# Longer than this, users want to see what is happening.
PATIENCE_SECONDS = 2.0
MOST_LINES = 20  # shown of the backend's log if it fails


class DemoFailed(Exception):
    """The demo failed; `str()` says why in one line. Lines of the backend's log may follow it."""


def say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)


class Backend:
    """The backend process and its stderr."""

    def __init__(self, port: int) -> None:
        environment = dict(os.environ)
        count = environment.pop("RANKS", "")
        ranks = ["--ranks", count] if count else []
        # This backend is only for the demo; a token meant for a host's backends would lock us out.
        environment.pop("LOCALAI_GRPC_AUTH_TOKEN", None)
        try:
            # A session of its own: Ctrl-C is for this program, which then stops the backend.
            self.process = subprocess.Popen(
                [str(ROOT / "run.sh"), "--addr", f"127.0.0.1:{port}", *ranks],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise DemoFailed(f"run.sh could not be started: {error}") from error
        self.faults: deque[str] = deque(maxlen=MOST_LINES)  # lines that may say what is wrong
        self._kills = kills_for_memory()
        self.show_lines = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                if tells_fault(line):
                    self.faults.append(line)
                if self.show_lines.is_set():
                    print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def shown_if_slow(self) -> Iterator[None]:
        """Print the backend's own lines if the block takes longer than a moment."""
        timer = threading.Timer(PATIENCE_SECONDS, self.show_lines.set)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.show_lines.clear()

    def require_alive(self) -> None:
        code = self.process.poll()
        if code is None:
            return
        self._reader.join(timeout=STOP_SECONDS)
        *before, last = [*self.faults] or [""]
        ran_out = kills_for_memory() > self._kills
        end = end_of("the backend", code, last, out_of_memory=ran_out)
        raise DemoFailed("\n".join([end, *before, *([] if last in end else [last])]))

    def wait_a_moment(self) -> None:
        """Give the process a second to end: its connections break shortly before."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except BaseException as error:
                # The session has only the backend and its own children.
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise DemoFailed(
                    f"the backend did not stop within {STOP_SECONDS:.0f} s of SIGTERM"
                ) from None
        self._reader.join(timeout=STOP_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_health(stub: backend_pb2_grpc.BackendStub, backend: Backend) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        backend.require_alive()
        try:
            answer = stub.Health(backend_pb2.HealthMessage(), timeout=1)
        except grpc.RpcError:
            time.sleep(0.02)
            continue
        if answer.message == b"OK":
            return
        raise DemoFailed(f"the backend's Health answered {answer.message!r} instead of 'OK'")
    problem = f"the backend did not answer Health within {START_SECONDS:.0f} s"
    raise DemoFailed("\n".join([problem, *backend.faults]))


def options_for(model: str) -> backend_pb2.ModelOptions:
    """Return the load of a folder or a hub id; for "", of the default model.

    Raises ModelUnavailable.
    """
    reference = model or str(default_model.ensure(say_plainly))
    options = backend_pb2.ModelOptions(Model=reference, ContextSize=CONTEXT_SIZE)
    local = Path(reference).expanduser()
    if local.exists():
        options.Model, options.ModelFile = local.absolute().name, str(local.absolute())
    return options


def say_plainly(line: str) -> None:
    say(line.removeprefix("model: "))


def load(
    stub: backend_pb2_grpc.BackendStub, backend: Backend, options: backend_pb2.ModelOptions
) -> None:
    say(f"loading {options.Model}")
    started = time.monotonic()
    with backend.shown_if_slow():
        result = stub.LoadModel(options)
    if not result.success:
        raise DemoFailed(f"the model was not loaded: {result.message}")
    say(f"loaded in {time.monotonic() - started:.1f} s")


def stream_answer(stub: backend_pb2_grpc.BackendStub, prompt: str) -> None:
    request = backend_pb2.PredictOptions(
        Messages=[backend_pb2.Message(role="user", content=prompt)],
        UseTokenizerTemplate=True,
        Tokens=MOST_TOKENS,
        Temperature=0,
    )
    print(f"> {prompt}", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = backend_pb2.Reply()
    first_text: float | None = None
    started = time.monotonic()
    stream = stub.PredictStream(request)
    try:
        for reply in stream:
            if reply.message and first_text is None:
                first_text = time.monotonic() - started
            print(decoder.decode(reply.message), end="", flush=True)
            last = reply
    finally:
        stream.cancel()
        print(flush=True)
    if first_text is None:
        raise DemoFailed("the model's answer is empty")
    if last.tokens >= MOST_TOKENS:
        say(f"the answer was cut after {MOST_TOKENS} tokens")
    print(summary(last, first_text))


def summary(last: backend_pb2.Reply, first_text: float) -> str:
    counts = f"{last.prompt_tokens} prompt tokens, {last.tokens} completion tokens"
    line = f"[{counts}, first token after {first_text:.2f} s"
    # The first token counts as prefill, so one token less remains.
    if last.timing_token_generation > 0 and last.tokens > 1:
        line += f", {(last.tokens - 1) * 1000 / last.timing_token_generation:.1f} tokens/s"
    return line + "]"


def reason(failure: Any) -> str:
    return f"{failure.details()} ({failure.code().name})"


def converse(prompt: str) -> None:
    model = options_for(os.environ.get("MODEL", ""))
    port = free_port()
    say("starting the backend")
    backend = Backend(port)
    try:
        channel_options = [
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 200),
            ("grpc.enable_http_proxy", 0),
        ]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options) as channel:
            stub = backend_pb2_grpc.BackendStub(channel)
            wait_for_health(stub, backend)
            try:
                load(stub, backend, model)
                stream_answer(stub, prompt)
                stub.Free(backend_pb2.HealthMessage(), timeout=STOP_SECONDS)
            except grpc.RpcError as error:
                # The log of a process that died explains more than a broken connection.
                failure: Any = error
                if failure.code() is grpc.StatusCode.UNAVAILABLE:
                    backend.wait_a_moment()
                    backend.require_alive()
                raise DemoFailed(reason(failure)) from error
    finally:
        backend.stop()


def terminated(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, terminated)
    try:
        converse(os.environ.get("PROMPT") or DEFAULT_PROMPT)
    except (DemoFailed, default_model.ModelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
