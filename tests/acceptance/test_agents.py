"""Prompts of agents are reused although agents change parts of them in every request."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.acceptance.backend import WAIT, Backend
from tests.polling import until
from wire import backend_pb2 as pb


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_only_the_new_turn_of_an_agent_is_prefilled(bare: Backend) -> None:
    bare.load()
    tools = [_tool(name) for name in ("read", "write", "search")]
    request = pb.PredictOptions(UseTokenizerTemplate=True, Tokens=1)
    orders = itertools.permutations(tools)
    for turn in range(4):
        header = f"x-anthropic-billing-header: cc_version=2.1.330; cch={turn:05x};"
        system = f"{header}\n\nYou are an agent.\n\nBe brief."
        request.Tools = json.dumps(next(orders))
        del request.Messages[:]
        request.Messages.add(role="system", content=system)
        request.Messages.add(role="user", content="Read the file.")
        reply, call = bare.stub.Predict.with_call(request, timeout=WAIT)
        cached = int(dict(call.trailing_metadata())["mlx-cached-tokens"])
        until(bare.idle)  # the prompt is stored
        assert cached == (reply.prompt_tokens - 1 if turn else 0)
