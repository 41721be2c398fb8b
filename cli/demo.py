"""Runs `make demo`: sends a question to a real model over gRPC, as a host does."""

import codecs
import os
import signal
import sys
import time
from types import FrameType

import grpc

from cli.backend_process import STOP_SECONDS, failure_of, options_for, process
from cli.default_model import ModelUnavailable
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

DEFAULT_PROMPT = "What is the capital of France?"
MOST_TOKENS = 256


def say(line: str) -> None:
    print(f"demo: {line.removeprefix('model: ')}", file=sys.stderr, flush=True)


def converse(prompt: str, model: str, ranks: str) -> None:
    """Load a model, and print its answer to a prompt. Raises ModelUnavailable or RuntimeError.

    model: a folder or a hub id; "" for the default model.
    ranks: the number of processes among which the model is divided; "" for one.
    """
    options = options_for(model, say)
    say("starting the backend")
    # A download takes long: the log shows its progress.
    log = {} if options.ModelFile else {"MLX_BACKEND_LOG": "info"}
    with process(log, arguments=["--ranks", ranks] if ranks else []) as (child, stub):
        try:
            say(f"loading {options.Model}")
            started = time.monotonic()
            stub.LoadModel(options)
            say(f"loaded in {time.monotonic() - started:.1f} s")
            stream_answer(stub, prompt)
            stub.Free(pb.HealthMessage(), timeout=STOP_SECONDS)
        except grpc.RpcError as error:
            raise RuntimeError(failure_of(error, child)) from error


def stream_answer(stub: BackendStub, prompt: str) -> None:
    """Print the question, the answer as it is generated, and its speed. Raises RuntimeError."""
    request = pb.PredictOptions(
        Messages=[pb.Message(role="user", content=prompt)],
        UseTokenizerTemplate=True,
        Tokens=MOST_TOKENS,
    )
    print(f"> {prompt}", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    first_text: float | None = None
    started = time.monotonic()
    reply = pb.Reply()
    try:
        for reply in stub.PredictStream(request):
            if reply.message and first_text is None:
                first_text = time.monotonic() - started
            print(decoder.decode(reply.message), end="", flush=True)
    finally:
        print(flush=True)
    if first_text is None:
        raise RuntimeError("the model's answer is empty")
    if reply.tokens >= MOST_TOKENS:
        say(f"the answer was cut after {MOST_TOKENS} tokens")
    print(summary(reply, first_text))


def summary(last: pb.Reply, first_text: float) -> str:
    counts = f"{last.prompt_tokens} prompt tokens, {last.tokens} completion tokens"
    line = f"[{counts}, first token after {first_text:.2f} s"
    # The first token counts as prefill, so one token less remains.
    if last.timing_token_generation > 0 and last.tokens > 1:
        line += f", {(last.tokens - 1) * 1000 / last.timing_token_generation:.1f} tokens/s"
    return line + "]"


def terminated(number: int, _frame: FrameType | None) -> None:
    """Raise SystemExit, so that `finally` stops the backend too."""
    raise SystemExit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, terminated)
    prompt, model, ranks = (os.environ.get(name, "") for name in ("PROMPT", "MODEL", "RANKS"))
    try:
        converse(prompt or DEFAULT_PROMPT, model, ranks)
    except (RuntimeError, ModelUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
