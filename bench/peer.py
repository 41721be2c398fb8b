"""mlx-lm as processes to measure against, with the libraries that the backend preloads."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.process import ROOT, Run
from cli.backend_process import environment_of, free_port
from common.launch import command
from common.process_end import end_of

# With its default backlog of 5, some of 16 simultaneous connections are reset or a second late.
_SERVER = """
from http.server import ThreadingHTTPServer
from mlx_lm.server import main
ThreadingHTTPServer.request_queue_size = 64
main()
"""


@contextmanager
def server(model: Path) -> Iterator[int]:
    """Start mlx_lm.server; yields its port."""
    port = free_port()
    child = subprocess.Popen(
        command("-c", _SERVER, "--model", str(model), "--port", str(port)),
        env=environment_of({}),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a line for every request
    )
    try:
        _until_healthy(child, port)
        yield port
    finally:
        child.terminate()
        child.wait()


def _until_healthy(child: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a server answers /health. Raises RuntimeError if it ended."""
    while child.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.05)
        finally:
            connection.close()
    raise RuntimeError(end_of("the server", child.returncode))


def stream(port: int, prompt: str, tokens: int, run: Run | None = None, **fields: object) -> Run:
    """Generate exactly `tokens` tokens, greedily. Raises RuntimeError if the server gave fewer.

    fields: other fields of the request.
    """
    run = run or Run()
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        json_type = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body | fields), json_type)
        for line in connection.getresponse():
            if run.leave.is_set():
                return run
            if line.startswith(b"data: {"):
                _take(run, json.loads(line[6:]))
    finally:
        connection.close()
        run.finish()
    if run.tokens != tokens:
        raise RuntimeError(f"the server returned {run.tokens} of {tokens} tokens")
    return run


def _take(run: Run, chunk: dict[str, object]) -> None:
    match chunk:
        case {"choices": [{"delta": {"content": str(text)} | {"reasoning": str(text)}}]} if text:
            run.piece()
        case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(tokens)}}:
            run.prompt_tokens, run.tokens = prompt, tokens


@contextmanager
def plain(folder: Path) -> Iterator[Callable[[object], Any]]:
    """Start `bench.plain_batches`; yields a function that sends it a request for its answer."""
    with subprocess.Popen(
        command("-m", "bench.plain_batches", str(folder)),
        env=environment_of({}),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asked, answered = child.stdin, child.stdout

        def ask(value: object) -> Any:
            print(json.dumps(value), file=asked, flush=True)
            if not (answer := answered.readline()):
                raise RuntimeError(end_of("mlx-lm", child.wait()))
            return json.loads(answer)

        try:
            yield ask
        finally:
            child.terminate()
