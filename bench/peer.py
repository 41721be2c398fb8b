"""mlx_lm.server as a process to measure against, with the libraries that the backend preloads."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.process import ROOT, Run
from cli.backend_process import environment_of, free_port
from common.process_end import end_of

# With its default backlog of 5, some of 16 simultaneous connections are reset or a second late.
_MAIN = """
from http.server import ThreadingHTTPServer
from mlx_lm.server import main
ThreadingHTTPServer.request_queue_size = 64
main()
"""


@contextmanager
def server(model: Path, threads: int | None = None) -> Iterator[int]:
    """Start the server; yields its port. threads: of OpenBLAS; None means the backend's number."""
    port = free_port()
    command = [str(ROOT / "scripts/python"), "-c", _MAIN]
    command += ["--model", str(model), "--port", str(port)]
    child = subprocess.Popen(
        command,
        env=environment_of({} if threads is None else {"OPENBLAS_NUM_THREADS": str(threads)}),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a line for every request
    )
    try:
        while not _healthy(port):
            if child.poll() is not None:
                raise RuntimeError(end_of("mlx_lm.server", child.returncode))
            time.sleep(0.05)
        yield port
    finally:
        child.terminate()
        child.wait()


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stream(port: int, prompt: str, tokens: int, run: Run | None = None) -> Run:
    """Generate exactly `tokens` tokens, greedily. Raises RuntimeError if the server gave fewer."""
    run = run or Run()
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        for line in connection.getresponse():
            if run.leave.is_set():
                return run
            if line.startswith(b"data: {"):
                _take(run, json.loads(line[6:]))
    finally:
        connection.close()
        run.finish()
    if run.tokens != tokens:
        raise RuntimeError(f"mlx_lm.server returned {run.tokens} of {tokens} tokens")
    return run


def _take(run: Run, chunk: dict[str, object]) -> None:
    match chunk:
        case {"choices": [{"delta": {"content": str()} | {"reasoning": str()}}]}:
            run.piece()
        case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(tokens)}}:
            run.prompt_tokens, run.tokens = prompt, tokens
