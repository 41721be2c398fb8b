"""What the prefix cache saves: time to first token, and prompt tokens in an agent's turns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backend.rpc.template_messages import template_messages
from bench import recorded
from bench.checkpoint import TINY, TINY_IDS
from bench.process import backend, stream, words
from bench.report import Figure, at_least, at_most
from common.prefixes import common_prefix
from tests.engine.loading_models import write_model
from tests.engine.random_models import CONFIGS
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

TOKENS = 1480
TURNS = 20
MOST_READ = 1.15  # maximum prompt tokens computed per new token
KINDS = {"attention": "full", "hybrid": "hybrid", "sliding window": "window"}


def measure(model: Path) -> Iterator[Figure]:
    """Measure the time to first token on `model`, and an agent's turns on the models of `KINDS`."""
    yield _first_token(model)
    for name, kind in KINDS.items():
        with TemporaryDirectory() as folder:
            written = _written(Path(folder) / kind, kind)
            with backend(written, ContextSize=1 << 15) as stub:
                yield _turns(stub, name, written)


def _first_token(model: Path) -> Figure:
    with backend(model) as stub:
        stream(stub, "Warm up.", 8)
        count = TOKENS // 4
        while stub.TokenizeString(pb.PredictOptions(Prompt=words(count))).length < TOKENS - 36:
            count += 1
        prompt = words(count)
        cold = stream(stub, prompt, 4)
        warm = stream(stub, prompt, 4)
    if cold.prompt_tokens != warm.prompt_tokens:
        raise RuntimeError(f"prompt_tokens differ: {cold.prompt_tokens}, {warm.prompt_tokens}")
    return at_least(
        f"cold / warm time to first token, {cold.prompt_tokens} tokens",
        cold.first / warm.first,
        20,
        f"{cold.first:.2f} / {warm.first:.2f} s",
    )


def _written(folder: Path, kind: str) -> Path:
    """Write a small model with random weights and the tokenizer of the trained one."""
    write_model(folder, **CONFIGS[kind] | TINY_IDS | {"max_position_embeddings": 1 << 15})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    return folder


def _turns(stub: backend_pb2_grpc.BackendStub, name: str, folder: Path) -> Figure:
    """Return the turn with the highest ratio of computed tokens to new tokens.

    The new tokens of a prompt are those after the longest prefix that it shares with any earlier
    prompt. Recorded answers replace the model's.
    """
    from mlx_lm.tokenizer_utils import load

    tokenizer: Any = load(folder)
    earlier: list[Sequence[int]] = []
    turns: list[tuple[int, int]] = []
    for messages in recorded.prompts(seed=1, turns=TURNS):
        prompt = tokenizer.apply_chat_template(
            list(template_messages(messages)),
            tools=json.loads(recorded.TOOLS),
            add_generation_prompt=True,
        )
        known = max((common_prefix(prompt, tokens) for tokens in earlier), default=0)
        read = _read(stub, messages, len(prompt))
        turns.append((read, len(prompt) - min(known, len(prompt) - 1)))
        earlier.append(prompt)
    following = turns[1:]
    read, new = (sum(column) for column in zip(*following, strict=True))
    worst = max(read / new for read, new in following)
    return at_most(
        f"prompt tokens read / new, worst turn, {name}",
        worst,
        MOST_READ,
        f"{read} / {new} in {len(following)} turns",
    )


def _read(stub: backend_pb2_grpc.BackendStub, messages: Sequence[pb.Message], tokens: int) -> int:
    """Return how many tokens of a prompt are computed.

    tokens: the expected length of the prompt.
    """
    request = pb.PredictOptions(
        Messages=messages,
        Tools=recorded.TOOLS,
        UseTokenizerTemplate=True,
        Tokens=4,
        IgnoreEOS=True,
    )
    call = stub.PredictStream(request)
    (*_, last) = call
    if last.prompt_tokens != tokens:
        raise RuntimeError(
            f"the prompt has {tokens} tokens, the backend counts {last.prompt_tokens}"
        )
    trailers = dict(call.trailing_metadata())
    return tokens - int(trailers["mlx-cached-tokens"])
