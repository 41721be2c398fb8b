"""Soak test of the gateway with three backends: checks that no process grows.

Clients of every API use a text model, a vision and audio model and an embedding model at once. They
send questions with known answers, invalid requests, and requests from which they disconnect. After
each round all idle processes are measured. SOAK_SECONDS sets the duration; the default is 600.
"""

from __future__ import annotations

import base64
import json
import os
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.report import Figure, Table, at_most, fact
from tests.engine.embedding import tiny_checkpoints
from tests.engine.vision.seeing import encoded, picture
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.openai.test_hearing import sound
from tests.soak.one_backend import Sample

SECONDS = 600.0
SETTLING = 180.0  # seconds that are not evaluated, or a third of the duration if that is less
LEAST_ROUNDS = 6
GROWTH = 1.05
CLIENTS = 9
# What each client does in a round, in random order.
SHARE = (*["ask"] * 6, *["leave"] * 2, *["wrong"] * 2)
_PATIENCE = httpx.Timeout(300.0)
# Fields that differ between equal answers.
_OWN = ("id", "call_id", "item_id", "created", "created_at", "completed_at", "timings", "logprob")
_TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
_COUNTS = ("usage", "cached_tokens", "prompt_eval_count", "bytes", "top_logprobs")
_QUIET = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A POST request, and the statuses with which it may end."""

    path: str
    body: Body | str
    statuses: tuple[int, ...] = (200,)

    def post(self, client: httpx.Client) -> httpx.Response:
        if isinstance(self.body, str):
            headers = {"content-type": "application/json"}
            return client.post(self.path, content=self.body, headers=headers)
        return client.post(self.path, json=self.body)


@dataclass
class Ledger:
    """How requests ended. wrong: descriptions of those that ended unexpectedly."""

    ends: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0
    left: int = 0


def measure(text: Path, senses: Path) -> Iterator[Figure | Table]:
    seconds = float(os.environ.get("SOAK_SECONDS", SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        vectors = tiny_checkpoints.write("bert", Path(folder) / "vectors")
        models = {
            "text": _generating(text),
            "senses": _generating(senses),
            "vectors": {"parameters": {"model": str(vectors)}, "embeddings": True},
        }
        gateway = GatewayProcess(models, MLX_BACKEND_LOG="error", MALLOC_ARENA_MAX="2")
        try:
            ledger = Ledger()
            samples = _rounds(gateway, ledger, seconds)
        finally:
            gateway.close()
    ends: Counter[int] = Counter()
    for (_, status), requests in ledger.ends.items():
        ends[status] += requests
    shown = ", ".join(f"{requests} of {status}" for status, requests in ends.most_common())
    yield fact("requests through the gateway", ends.total() + ledger.left, shown)
    yield fact("of these, given up by their clients", ledger.left)
    for sentence in ledger.wrong[:8]:
        print(f"  {sentence}")
    compared = f"{ledger.compared} compared"
    yield at_most("wrong answers", len(ledger.wrong), 0, compared)
    yield from _of_samples(samples, seconds)


def _generating(model: Path) -> dict[str, Any]:
    """A model file. The prompt cache is full within a minute, so that only leaks grow."""
    options = ["prompt_cache_mib:4"]
    return {"context_size": 2048, "parameters": {"model": str(model)}, "options": options}


def _rounds(gateway: GatewayProcess, ledger: Ledger, seconds: float) -> list[tuple[float, Sample]]:
    """Measurements of all processes, each with the seconds since the start."""
    samples: list[tuple[float, Sample]] = []
    lock = threading.Lock()
    with httpx.Client(base_url=gateway.url, timeout=_PATIENCE, trust_env=False) as client:
        known = {at: _content_of(request.post(client)) for at, request in enumerate(ASKED)}
        began = time.monotonic()
        while time.monotonic() < began + seconds or len(samples) < LEAST_ROUNDS:
            seeds = [f"round {len(samples)}, client {at}" for at in range(CLIENTS)]
            with ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(partial(_share, client, ledger, lock, known), seeds))
            samples.append((time.monotonic() - began, _sample(gateway, client)))
    return samples


def _share(
    client: httpx.Client, ledger: Ledger, lock: threading.Lock, known: Mapping[int, str], seed: str
) -> None:
    dice = random.Random(seed)
    for kind in dice.sample(SHARE, len(SHARE)):
        if kind == "leave":
            _leave(client, dice)
            with lock:
                ledger.left += 1
            continue
        at = dice.randrange(len(ASKED))
        request = ASKED[at] if kind == "ask" else dice.choice(WRONG)
        response = request.post(client)
        answer = _content_of(response) if kind == "ask" else ""
        with lock:
            ledger.ends[request.path, response.status_code] += 1
            if response.status_code not in request.statuses:
                what = f"{response.status_code} {response.text[:200]}"
                ledger.wrong.append(f"{request.path} {str(request.body)[:200]}: {what}")
            elif kind == "ask":
                ledger.compared += 1
                if answer != known[at]:
                    ledger.wrong.append(f"{request.path}: {answer[:200]}, not {known[at][:200]}")


def _leave(client: httpx.Client, dice: random.Random) -> None:
    """Disconnect after a random number of lines of an endless answer."""
    model = dice.choice(["text", "senses"])
    body = {
        "model": model,
        "stream": True,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": f"Count to {dice.randrange(2, 60)}."}],
    }
    lines = dice.randrange(30)
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for at, _ in enumerate(answer.iter_lines()):
            if at >= lines:
                break


def _content_of(response: httpx.Response) -> str:
    """The content of an answer, without the fields that differ between equal answers."""
    kind = response.headers.get("content-type", "")
    if kind.startswith("application/json"):
        return json.dumps(_bare(response.json()))
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return "".join(_texts(_bare(events)))


def _bare(node: Any) -> Any:
    if isinstance(node, dict):
        left_out = {*_OWN, *_TIMES, *_COUNTS}
        if isinstance(vector := node.get("embedding"), str):
            node = node | {"embedding": array("f", base64.b64decode(vector)).tolist()}
        return {key: _bare(value) for key, value in node.items() if key not in left_out}
    if isinstance(node, list):
        return [_bare(one) for one in node]
    return round(node, 4) if isinstance(node, float) else node


def _texts(events: Sequence[Any]) -> Iterator[str]:
    """The texts in a stream's events; callers join them, because streams are split differently."""
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            yield delta.get("content") or choice.get("text") or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                yield (function.get("name") or "") + (function.get("arguments") or "")
        if isinstance(delta := event.get("delta"), dict):
            yield delta.get("text") or ""
        elif isinstance(delta, str):
            yield delta
        if isinstance(message := event.get("message"), dict):
            content = message.get("content")
            yield content if isinstance(content, str) else ""


def _sample(gateway: GatewayProcess, client: httpx.Client) -> Sample:
    while any(model["running"] for model in client.get("/api/status").json()["models"]):
        time.sleep(0.01)
    resident = threads = descriptors = 0
    for process in gateway.processes():
        resident += process.memory_info().rss
        threads += process.num_threads()
        descriptors += process.num_fds()
    return Sample(resident, 0, threads, descriptors)


def _of_samples(
    samples: Sequence[tuple[float, Sample]], seconds: float
) -> Iterator[Figure | Table]:
    """After SETTLING, the last third of the measurements against the first third."""
    rows = [
        (
            f"{at:.0f}",
            f"{sample.resident / 2**20:.1f}",
            str(sample.threads),
            str(sample.descriptors),
        )
        for at, sample in samples[:: max(len(samples) // 20, 1)]
    ]
    title = "All processes at rest:"
    yield Table(title, ("seconds", "resident MiB", "threads", "descriptors"), rows)
    settled = [sample for at, sample in samples if at >= min(SETTLING, seconds / 3)] or [
        samples[-1][1]
    ]
    third = max(len(settled) // 3, 1)
    ways: tuple[tuple[str, Callable[[Sample], float]], ...] = (
        ("resident MiB", lambda sample: sample.resident / 2**20),
        ("threads", lambda sample: sample.threads),
        ("descriptors", lambda sample: sample.descriptors),
    )
    for name, of in ways:
        before = statistics.median(map(of, settled[:third]))
        after = statistics.median(map(of, settled[-third:]))
        shown = f"{before:.1f} to {after:.1f}"
        yield at_most(f"{name}, last third / first, settled", after / before, GROWTH, shown)


def _user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def _chat(model: str, content: Any, **fields: Any) -> Request:
    body = {"model": model, "messages": _user(content), "max_tokens": 60, **_QUIET, **fields}
    return Request("/v1/chat/completions", body)


def _image(colour: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{encoded(picture(colour))}"
    return {"type": "image_url", "image_url": {"url": url}}


_FORM = {"type": "json_schema", "json_schema": {"name": "p", "schema": _PERSON, "strict": True}}
_TOOL = {"type": "function", "function": _WEATHER}
_COLOUR = {"type": "text", "text": "What colour is the image?"}
_PLAIN = {"think": False, "options": {"temperature": 0}}
ASKED = (
    _chat("text", "What is the capital of France?"),
    _chat("text", "Count to 30.", stream=True),
    _chat("text", "What is 3 + 4?", stream=True, logprobs=True, top_logprobs=2),
    _chat("text", "Tell me about a cat.", response_format=_FORM),
    _chat("text", "What is the weather in Paris?", tools=[_TOOL], tool_choice="required"),
    _chat("text", "What is the weather in Paris?", tools=[_TOOL], stream=True),
    Request(
        "/v1/completions", {"model": "text", "prompt": "Once", "max_tokens": 20, "temperature": 0}
    ),
    Request(
        "/v1/messages",
        {"model": "text", "messages": _user("Say hello."), "max_tokens": 30, "temperature": 0},
    ),
    Request(
        "/v1/messages",
        {
            "model": "text",
            "messages": _user("Count to 9."),
            "max_tokens": 40,
            "temperature": 0,
            "stream": True,
        },
    ),
    Request("/v1/responses", {"model": "text", "input": "Count to 12.", "temperature": 0}),
    Request(
        "/v1/responses",
        {"model": "text", "input": "Count to 5.", "temperature": 0, "stream": True},
    ),
    Request(
        "/api/chat",
        {"model": "text", "messages": _user("Count to 7."), "stream": False, **_PLAIN},
    ),
    Request("/v1/tokenize", {"model": "text", "content": "one two three"}),
    *(_chat("senses", [_image(colour), _COLOUR]) for colour in ("blue", "red", "green")),
    _chat("senses", [_image("yellow"), _COLOUR], stream=True),
    _chat("senses", [sound("low"), {"type": "text", "text": "What is the sound like?"}]),
    _chat("senses", "What is the capital of France?"),
    Request("/v1/embeddings", {"model": "vectors", "input": ["paris of france", "the moon"]}),
    Request("/v1/embeddings", {"model": "vectors", "input": "river", "encoding_format": "base64"}),
)
WRONG = (
    Request("/v1/chat/completions", "{", (400,)),
    Request("/v1/chat/completions", '{"x":' + "[" * 5000, (400,)),
    Request("/v1/chat/completions", '{"model": "nobody", "messages": []}', (400, 404)),
    Request(
        "/v1/chat/completions", {"model": "text", "messages": _user("x"), "top_p": -1}, (400, 422)
    ),
    replace(_chat("text", [_image("blue"), _COLOUR]), statuses=(400,)),
    Request(
        "/v1/chat/completions",
        {"model": "senses", "messages": _user([{"type": "image_url", "image_url": {"url": "x"}}])},
        (400, 422),
    ),
    Request(
        "/v1/completions", {"model": "text", "prompt": "x", "grammar": "root ::= nowhere"}, (400,)
    ),
    Request("/v1/completions", {"model": "text", "prompt": "word " * 9000}, (400,)),
    Request("/v1/chat/completions", {"model": "vectors", "messages": _user("x")}, (400, 404, 501)),
    Request("/v1/messages", {"model": "text", "messages": _user("x")}, (400,)),
)
