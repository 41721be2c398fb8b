"""Experts that stay in the checkpoint's files, at several sizes of their cache.

The model is a mixture of experts with random weights, whose routers prefer some experts over others
as those of trained models do. All sides compute in the same type, and take turns in every round.
Once the system has the files in its page cache, a read costs what copying costs; the bytes that are
read for each token say what a disk would add.

The second table compares decoding with and without reading ahead, in this process. The file is in
the page cache, or dropped from it before each token, or each of its reads takes 5 ms longer, as
from a slow disk.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten

from backend.engine.experts.offload import offload, slots_of
from backend.engine.experts.read_ahead import MOST_TOKENS
from backend.engine.loading.weights import cast
from backend.engine.units import MIB
from bench.checkpoint import TINY_IDS, cached, copy_tokenizer
from bench.process import backend, text
from bench.report import Table
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub

SHARES = (1.0, 0.5, 0.25, 0.125)
SOURCES = ("page cache", "disk", "slow disk")
ROWS = (1, 4)
ROUNDS = 3
TOKENS = 32
PROMPT = 60  # words of a prompt whose prefill is timed
_DELAY = 0.005  # seconds
_LAYERS, _EXPERTS, _WIDTH, _INNER = 6, 64, 512, 384
_SKEW = 2.5  # how far the logit of the most popular expert is above that of the least popular
_EXPERT_BYTES = 4 * 3 * _WIDTH * _INNER  # in memory
_CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "moe_intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


@dataclass
class _Side:
    """A backend.

    share: the share of experts that fit in its cache; 0 if all are in memory.
    """

    share: float
    stub: BackendStub
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, turn: int) -> None:
        for rows in ROWS:
            with ThreadPoolExecutor(rows) as pool:
                replies = list(pool.map(self.ask, [f"{turn} {row}" for row in range(rows)]))
            decoded = sum(1e3 * (TOKENS - 1) / each.timing_token_generation for each in replies)
            self.speeds.setdefault(f"{rows} row{'s' * (rows > 1)}", []).append(decoded)
        reply = self.ask(f"{turn} long", PROMPT, 1)
        read = 1e3 * reply.prompt_tokens / reply.timing_prompt_processing
        self.speeds.setdefault("prefill", []).append(read)

    def ask(self, seed: str, words: int = 8, tokens: int = TOKENS) -> pb.Reply:
        """Return an answer with drawn tokens, because greedy tokens would soon repeat."""
        request = pb.PredictOptions(
            Prompt=text(seed, words), Tokens=tokens, IgnoreEOS=True, Temperature=1.0, Seed=words
        )
        reply: pb.Reply = self.stub.Predict(request)
        return reply

    def counts(self) -> dict[str, float]:
        _, call = self.stub.GetMetrics.with_call(pb.MetricsRequest())
        found = dict(call.trailing_metadata())
        return {key: float(value) for key, value in found.items() if "expert" in key}


def measure() -> Iterator[Table]:
    """Measure the speed with experts in files, relative to the same model in memory."""
    model = _checkpoint()
    with ExitStack() as stack:
        sides = []
        for share in (0.0, *SHARES):
            options = {"Options": [f"expert_cache_mib:{_cache(share)}"]} if share else {}
            sides.append(_Side(share, stack.enter_context(backend(model, **options))))
        for turn in range(ROUNDS):
            for side in sides if turn % 2 else reversed(sides):
                side.time(turn)
        yield Table(
            "Experts in files: speed relative to experts in memory, medians of the rounds",
            ["slots", *sides[0].speeds, "hits", "MiB read per token", "s waited per s"],
            [_row(side, sides[0]) for side in sides[1:]],
        )
    yield Table(
        "Experts read ahead: speed relative to none read ahead, medians of the rounds",
        ["slots", "from", "speed", "misses", "read ahead", "MiB read per token", "in vain"],
        [_ahead_row(model, share, source) for share in SHARES[1:] for source in SOURCES],
    )


def _ahead_row(folder: Path, share: float, source: str) -> list[str]:
    """Return how reading ahead changes the speed of decoding one row.

    source: one of SOURCES.
    """
    from mlx_lm.utils import load_model

    model = load_model(folder, lazy=True)[0]
    cast(model, "float32")
    stages = offload(model, "bench", folder, _cache(share) * MIB)
    while True:
        try:
            next(stages)
        except StopIteration as end:
            counts = end.value.counts
            break
    mx.eval(model.parameters())
    file = (folder / "model.safetensors") if source == "disk" else None
    delay = _DELAY if source == "slow disk" else 0.0
    _decode(model, file, delay, ahead=False)
    ratios, answers = [], set()
    for turn in range(ROUNDS):
        seconds: dict[bool, float] = {}
        for ahead in (turn % 2 == 0, turn % 2 == 1):
            before = replace(counts)
            seconds[ahead], answer = _decode(model, file, delay, ahead=ahead)
            answers.add(answer)
            if ahead:
                misses = counts.misses - before.misses
                hits = counts.ahead_hits - before.ahead_hits
                read = (counts.read_bytes - before.read_bytes) / TOKENS / MIB
                vain = (counts.wasted_bytes - before.wasted_bytes) / TOKENS / MIB
        ratios.append(seconds[False] / seconds[True])
    if len(answers) > 1:
        raise AssertionError("reading ahead has changed an answer")
    figures = [str(misses), f"{hits / misses:.0%}", f"{read:.1f}", f"{vain:.1f}"]
    speed = f"{statistics.median(ratios):.2f}"
    return [f"{share:.1%}", source, speed, *figures]


def _decode(
    model: Any, dropped: Path | None, delay: float, *, ahead: bool
) -> tuple[float, tuple[int, ...]]:
    """Return the seconds of an answer with drawn tokens, and its tokens.

    delay: seconds by which each read takes longer.
    """
    from mlx_lm.models.cache import make_prompt_cache

    read = os.preadv

    def late(*call: Any) -> int:
        time.sleep(delay)
        return read(*call)

    mx.random.seed(3)
    cache, token, seconds = make_prompt_cache(model), 7, 0.0
    answer = []
    with (
        patch("backend.engine.experts.layer_cache.MOST_TOKENS", MOST_TOKENS if ahead else 0),
        patch.object(os, "preadv", late if delay else read),
        (dropped or Path(os.devnull)).open("rb") as file,
    ):
        for _ in range(TOKENS):
            if dropped:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            logits = model(mx.array([[token]]), cache=cache)[0, -1]
            token = int(mx.random.categorical(logits))
            seconds += time.perf_counter() - began
            answer.append(token)
    return seconds, tuple(answer)


def _cache(share: float) -> int:
    """Return the MiB of a cache that holds this share of the experts."""
    sizes = [_EXPERT_BYTES] * _LAYERS
    return next(mib for mib in count(1) if slots_of(mib * MIB, sizes)[0] >= share * _EXPERTS)


def _row(side: _Side, resident: _Side) -> list[str]:
    ratios = [
        statistics.median(
            mine / theirs for mine, theirs in zip(speeds, resident.speeds[key], strict=True)
        )
        for key, speeds in side.speeds.items()
    ]
    return [f"{side.share:.1%}", *(f"{ratio:.2f}" for ratio in ratios), *_reads(side)]


def _reads(side: _Side) -> list[str]:
    """Return hits, bytes and waiting of one more answer of one row."""
    before = side.counts()
    reply = side.ask("counted")
    seconds = (reply.timing_prompt_processing + reply.timing_token_generation) / 1e3
    grown = {key: value - before[key] for key, value in side.counts().items()}
    used = grown["mlx-expert-hits"] + grown["mlx-expert-misses"]
    return [
        f"{grown['mlx-expert-hits'] / used:.0%}",
        f"{grown['mlx-expert-read-bytes'] / TOKENS / MIB:.1f}",
        f"{grown['mlx-expert-wait-seconds'] / seconds:.2f}",
    ]


def _checkpoint() -> Path:
    """Return the checkpoint, written to the cache once: 450 MiB in bfloat16, 900 MiB in memory."""

    def write(folder: Path) -> None:
        copy_tokenizer(folder)
        config = _CONFIG | TINY_IDS
        (folder / "config.json").write_text(json.dumps(config))
        weights = _weights(config)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})

    return cached("experts", write)


def _weights(config: dict[str, Any]) -> dict[str, mx.array]:
    """Return random weights. A direction common to all tokens makes routers prefer some experts."""
    from mlx_lm.models import qwen3_moe

    mx.random.seed(3)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    shared = mx.random.normal((_WIDTH,))
    model.model.embed_tokens.weight = mx.random.normal((config["vocab_size"], _WIDTH)) + shared
    for layer in model.model.layers:
        popular = mx.random.permutation(mx.linspace(0, _SKEW, _EXPERTS))
        own = mx.random.normal((_EXPERTS, _WIDTH)) / _WIDTH**0.5
        layer.mlp.gate.weight = own + 2**0.5 * popular[:, None] * shared / _WIDTH
    model.set_dtype(mx.bfloat16)
    named: Any = tree_flatten(model.parameters())
    return dict(named)
