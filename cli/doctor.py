"""Runs `mlx-backend doctor` and `make doctor`, which test whether the backend works here.

Doctor loads one model, tests what can differ between devices, and compares the speed with that of
mlx-lm on the same checkpoint. It prints a report and writes it as JSON, to paste into an issue. The
report contains no paths of the machine, and only doctor's own prompts.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import grpc

from cli.backend_process import STOP_SECONDS, environment_of, failure_of, options_for, process
from cli.default_model import ModelUnavailable
from common.launch import ROOT, command
from common.openblas import KERNELS, LIBRARY
from common.process_end import end_of
from common.version import VERSION
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "grpcio", "llguidance", "transformers")
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours, and say of each what it reminds you of.",
    "Write a short poem about a river that flows through an old town to the sea.",
    "Explain to a child why the sky is blue, in two sentences.",
)
TOKENS = 32
DECODE_TOKENS = 64
TOGETHER = (4, 16)  # numbers of answers that run at once
PREFILL_WORDS = 300
NEAR_TIE = 0.25  # nats; smaller differences between two tokens may be rounding in half precision
LEAVE_SECONDS = 10.0
CACHED_TOKENS = "mlx-cached-tokens"

Verdict = Literal["ok", "note", "FAILED"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: Verdict
    detail: str  # what was found, for the printed report
    figures: dict[str, Any] = field(default_factory=dict)  # for the JSON report

    def __str__(self) -> str:
        return f"{self.verdict:<6}  {self.name:<28}  {self.detail}"


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer.

    tokens: the tokens as strings; empty if the request asked for no log-probabilities.
    best: for each token, the log-probabilities of the likeliest tokens at its position.
    prefill: seconds that the backend reports for the prompt.
    decode: seconds that the backend reports for the tokens after the first.
    """

    tokens: list[str]
    best: list[dict[str, float]]
    text: str
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    prefill: float
    decode: float


def examine(options: pb.ModelOptions) -> Iterator[Finding]:
    """Run all checks on a model, and yield each finding as soon as it is known."""
    try:
        yield machine()
    except subprocess.CalledProcessError as end:
        last = end.stderr.strip().rpartition("\n")[2]
        yield Finding("machine", "FAILED", end_of("Python with MLX", end.returncode, last))
    began = time.perf_counter()
    with ExitStack() as running:
        try:
            child, stub = running.enter_context(process())
        except RuntimeError as end_at_start:
            yield Finding("start", "FAILED", str(end_at_start))
            return
        yield Finding("start", "ok", f"Health after {time.perf_counter() - began:.1f} s")
        ours: dict[str, float] = {}
        checks: dict[str, Callable[[BackendStub], Finding]] = {
            "load": partial(_load, options),
            "answer": _answer,
            "grammar": _grammar,
            "batching": _batching,
            "prefix": _prefix,
            "cancel": _cancel,
            "memory": partial(_measured, ours),
        }
        for name, check in checks.items():
            finding = _guarded(name, check, stub, child)
            yield finding
            if child.poll() is not None or (name == "load" and finding.verdict == "FAILED"):
                return
        stub.Free(pb.HealthMessage(), timeout=STOP_SECONDS)
    if ours:
        yield _compared(ours, options)


def machine() -> Finding:
    script = (
        "import dataclasses, json; from backend.engine.device import detect;"
        " print(json.dumps(dataclasses.asdict(detect())))"
    )
    device = json.loads(_child(["-c", script]))
    versions = {name: version(name) for name in PACKAGES}
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    detail = (
        f"{device['kind']}: {device['name']}, {_mib(device['usable_bytes'])} of"
        f" {_mib(device['memory_bytes'])} usable; {system}, Python {platform.python_version()},"
        f" mlx-backend {VERSION}, "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
    )
    preloaded = os.environ.get("LD_PRELOAD", "").split(":")
    if device["kind"] == "cpu" and LIBRARY in preloaded:
        detail += ", products by OpenBLAS"
        if platform.machine() == "x86_64" and KERNELS not in preloaded:
            detail += " (no C compiler was found for common/kernels, which answers faster)"
    figures = {"device": device, "system": system, "versions": versions, "cores": os.cpu_count()}
    return Finding("machine", "ok", detail, figures)


def _guarded(
    name: str,
    check: Callable[[BackendStub], Finding],
    stub: BackendStub,
    child: subprocess.Popen[bytes],
) -> Finding:
    """Run a check, and return its finding. It fails if the backend refuses a request, or ends.

    A request that models of this kind do not support is not a failure.
    """
    try:
        return check(stub)
    except grpc.RpcError as error:
        failed: Any = error
        if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Finding(name, "note", f"not checked: {failed.details()}")
        return Finding(name, "FAILED", failure_of(error, child))


def _load(options: pb.ModelOptions, stub: BackendStub) -> Finding:
    tried = pb.ModelOptions()
    tried.CopyFrom(options)
    tried.Options.append("load_trial:true")  # even if findings of an earlier load are stored
    began = time.perf_counter()
    stub.LoadModel(tried)
    seconds = time.perf_counter() - began
    parts = dict(stub.Status(pb.HealthMessage()).memory.breakdown)
    detail = f"{options.Model} in {seconds:.1f} s, weights {_mib(parts['weights'])}"
    return Finding("load", "ok", detail, {"seconds": seconds, **parts})


def _answer(stub: BackendStub) -> Finding:
    answer = ask(stub, QUESTIONS[0])
    found = bool(answer.text.strip())
    return Finding("answer", "ok" if found else "FAILED", f"{QUESTIONS[0]} {answer.text!r}")


def _grammar(stub: BackendStub) -> Finding:
    answer = ask(stub, "Is water wet?", Grammar='root ::= "yes" | "no"', IgnoreEOS=False)
    obeyed = answer.text in ("yes", "no")
    return Finding("grammar", "ok" if obeyed else "FAILED", f'"yes" | "no": {answer.text!r}')


def _batching(stub: BackendStub) -> Finding:
    """Check that prompts get the same tokens in a batch as alone."""
    alone = [ask(stub, question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: ask(stub, question), QUESTIONS))
    gaps = [difference(one, other) for one, other in zip(alone, together, strict=True)]
    found = [gap for gap in gaps if gap is not None]
    verdict, detail = judged(found, len(gaps))
    return Finding("alone and in a batch", verdict, detail, {"gaps": found})


def difference(answer: Answer, other: Answer) -> float | None:
    """Compare two answers at the first position where their tokens differ.

    Returns by how many nats `answer` rates its own token higher than the token of `other`. Returns
    None if the answers are equal, and infinity if the other token is not in `answer.best`.
    """
    for at, (mine, theirs) in enumerate(zip(answer.tokens, other.tokens, strict=False)):
        if mine != theirs:
            best = answer.best[at]
            return best[mine] - best[theirs] if theirs in best else float("inf")
    return None if len(answer.tokens) == len(other.tokens) else float("inf")


def judged(gaps: Sequence[float], count: int) -> tuple[Verdict, str]:
    """Return the verdict on the differences between answers alone and in a batch, and its text.

    A GPU's kernels may round differently for another batch size. This is no failure, because it
    changes only the order of tokens that are nearly equally likely.

    gaps: the results of `difference` for the answers that differ.
    count: number of all answers.
    """
    if not gaps:
        return "ok", f"{count} of {count} answers are equal"
    detail = (
        f"{len(gaps)} of {count} answers differ, where the tokens are {max(gaps):.2f} nats apart"
    )
    return ("note", f"{detail}: near ties") if max(gaps) < NEAR_TIE else ("FAILED", detail)


def _prefix(stub: BackendStub) -> Finding:
    text = words(PREFILL_WORDS // 2)
    first = ask(stub, f"{text} Which item is the first?", tokens=4)
    again = ask(stub, f"{text} Which item is the last?", tokens=4)
    share = again.cached_tokens / again.prompt_tokens
    detail = (
        f"{again.cached_tokens} of {again.prompt_tokens} prompt tokens reused, first token after"
        f" {again.prefill:.2f} s in place of {first.prefill:.2f} s"
    )
    return Finding("prefix cache", "ok" if share > 0.5 else "FAILED", detail, {"share": share})


def _cancel(stub: BackendStub) -> Finding:
    """Check that the slot becomes free when a client disconnects."""
    call = stub.PredictStream(_request(QUESTIONS[2], 1000, {}))
    for _ in zip(range(3), call, strict=False):
        pass
    call.cancel()
    left = time.perf_counter()
    while stub.Status(pb.HealthMessage()).state != pb.StatusResponse.READY:
        if time.perf_counter() - left > LEAVE_SECONDS:
            return Finding(
                "cancel", "FAILED", f"still busy {LEAVE_SECONDS:.0f} s after the client left"
            )
        time.sleep(0.01)
    seconds = time.perf_counter() - left
    return Finding(
        "cancel", "ok", f"idle {seconds:.2f} s after the client left", {"seconds": seconds}
    )


def _speed(stub: BackendStub) -> dict[str, float]:
    """Measure the tokens per second of a prefill, of a decode, and of several answers at once."""

    def answer(prompt: str, tokens: int = DECODE_TOKENS) -> Answer:
        return ask(stub, prompt, tokens, TopLogprobs=0)

    prompt = words(PREFILL_WORDS)
    answer("Warm up. " + prompt, tokens=8)
    one = answer(prompt)
    speeds = {
        "prefill": (one.prompt_tokens - one.cached_tokens) / one.prefill,
        "decode": (one.completion_tokens - 1) / one.decode,
    }
    for width in TOGETHER:
        with ThreadPoolExecutor(width) as pool:
            list(pool.map(partial(answer, tokens=8), _questions(width)))
            began = time.perf_counter()
            runs = list(pool.map(answer, _questions(width)))
        seconds = time.perf_counter() - began
        speeds[_together(width)] = sum(run.completion_tokens for run in runs) / seconds
    return speeds


def _questions(width: int) -> list[str]:
    return [f"{QUESTIONS[at % len(QUESTIONS)]} ({at})" for at in range(width)]


def _together(width: int) -> str:
    return f"{width} answers at once"


def _measured(speeds: dict[str, float], stub: BackendStub) -> Finding:
    """Measure the speeds, add them to `speeds`, and return the memory that MLX then uses."""
    speeds |= _speed(stub)
    parts = dict(stub.Status(pb.HealthMessage()).memory.breakdown)
    return Finding("memory", "ok", f"MLX uses {_mib(parts['mlx_active'])}", parts)


def _compared(ours: dict[str, float], options: pb.ModelOptions) -> Finding:
    """Compare the backend's speeds with those of mlx-lm, which a separate process measures."""
    model = options.ModelFile or options.Model
    try:
        theirs = dict(json.loads(_child(["-m", "cli.doctor", model])))
    except subprocess.CalledProcessError as end:
        parts = [f"{name} {speed:.1f} tokens/s" for name, speed in ours.items()]
        detail = "; ".join([*parts, end_of("mlx-lm", end.returncode)])
        return Finding("speed", "note", detail, {"backend": ours, "mlx_lm": {}})
    parts = [
        f"{name} {speed:.1f} tokens/s, mlx-lm {theirs[name]:.1f} (ratio {speed / theirs[name]:.2f})"
        for name, speed in ours.items()
    ]
    slow = ours["decode"] < 0.8 * theirs["decode"]
    figures = {"backend": ours, "mlx_lm": theirs}
    return Finding("speed", "note" if slow else "ok", "; ".join(parts), figures)


def ask(stub: BackendStub, prompt: str, tokens: int = TOKENS, **fields: Any) -> Answer:
    """Return a greedy answer of `tokens` tokens."""
    reply, rpc = stub.Predict.with_call(_request(prompt, tokens, fields))
    entries = json.loads(reply.logprobs)["content"] if reply.logprobs else []
    trailers = dict(rpc.trailing_metadata())
    return Answer(
        [entry["token"] for entry in entries],
        [
            {token["token"]: token["logprob"] for token in entry["top_logprobs"]}
            for entry in entries
        ],
        reply.message.decode(errors="replace"),
        reply.tokens,
        reply.prompt_tokens,
        int(trailers.get(CACHED_TOKENS, 0)),
        reply.timing_prompt_processing / 1e3,
        reply.timing_token_generation / 1e3,
    )


def _request(prompt: str, tokens: int, fields: dict[str, Any]) -> pb.PredictOptions:
    wanted: dict[str, Any] = {"IgnoreEOS": True, "TopLogprobs": 5} | fields
    return pb.PredictOptions(
        Messages=[pb.Message(role="user", content=prompt)],
        UseTokenizerTemplate=True,
        Tokens=tokens,
        **wanted,
    )


def mlx_lm_speeds(model: str) -> dict[str, float]:
    """Measure the speeds of mlx-lm, as `_speed` does, in the process that `_compared` starts.

    `stream_generate` generates one answer, and `batch_generate` several. On a CPU, mlx-lm is
    configured to compute as the backend does: in float32, without MLX's compiler.
    """
    import mlx.core as mx
    from mlx_lm import batch_generate, load, stream_generate

    loaded, tokenizer, *_ = load(model)
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()
        loaded.set_dtype(mx.float32)
    tokenizer.eos_token_ids = ()

    def chat(prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    text = words(PREFILL_WORDS)
    for prompt, tokens in ((f"Warm up. {text}", 8), (text, DECODE_TOKENS)):
        *_, last = stream_generate(loaded, tokenizer, chat(prompt), max_tokens=tokens)
    speeds = {"prefill": last.prompt_tps, "decode": last.generation_tps}
    for width in TOGETHER:
        prompts = [chat(question) for question in _questions(width)]
        sizes = {"completion_batch_size": width, "prefill_batch_size": width}
        for tokens in (8, DECODE_TOKENS):
            began = time.perf_counter()
            batch_generate(loaded, tokenizer, prompts, max_tokens=tokens, **sizes)
        speeds[_together(width)] = width * DECODE_TOKENS / (time.perf_counter() - began)
    return speeds


def _child(arguments: Sequence[str]) -> str:
    """Run Python in the backend's environment, and return the last line that it prints."""
    done = subprocess.run(
        command(*arguments),
        env=environment_of({}),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip().splitlines()[-1]


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"


def words(count: int) -> str:
    """Return a text of `count` different words."""
    return " ".join(f"item{number}" for number in range(count))


def run(model: str, report: Path) -> int:
    """Check a model, and write the report. Returns 1 if a check has failed.

    model: a folder or a hub id; "" for the default model.
    """
    try:
        options = options_for(model)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.touch()
    except ModelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: the report cannot be written: {error}", file=sys.stderr)
        return 1
    findings = []
    for finding in examine(options):
        print(finding, flush=True)
        findings.append(finding)
    report.write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    failed = sum(finding.verdict == "FAILED" for finding in findings)
    print(f"doctor: {failed or 'none'} of {len(findings)} checks failed; the report is in {report}")
    return 1 if failed else 0


if __name__ == "__main__":  # the process of `_compared`
    print(json.dumps(mlx_lm_speeds(sys.argv[1])))
