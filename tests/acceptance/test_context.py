"""A load without a context size: the context is as long as memory allows, and no longer."""

from __future__ import annotations

import json
import re

import pytest

from tests.acceptance.backend import TINY_TEXT, WAIT, Backend, refusal
from tests.polling import until
from wire import backend_pb2 as pb

OWN = 8192  # tokens; the model's maximum


def load(backend: Backend, *options: str, size: int = 0) -> int:
    """The context with which the model was loaded, as the call's metadata has it."""
    request = pb.ModelOptions(
        Model="tiny_text", ModelFile=str(TINY_TEXT), ContextSize=size, Options=options
    )
    result, call = backend.stub.LoadModel.with_call(request, timeout=WAIT)
    tokens = int(dict(call.trailing_metadata())["mlx-context-size"])
    assert re.search(rf"context {tokens} tokens", result.message)
    assert ("mlx-context-reason" in dict(call.trailing_metadata())) is (tokens < OWN)
    return tokens


def asked(tokens: int) -> pb.PredictOptions:
    ids = [5 + at % 200 for at in range(tokens)]
    return pb.PredictOptions(
        Tokens=1, IgnoreEOS=True, Metadata={"mlx.prompt_token_ids": json.dumps(ids)}
    )


@pytest.mark.parametrize("options", [(), ("kv_bits:8",)], ids=["full", "quantised"])
def test_the_longest_prompt_that_memory_holds_is_served(
    bare: Backend, options: tuple[str, ...]
) -> None:
    context = load(bare, "memory_limit_mib:6", *options)
    assert 512 < context < OWN
    until(lambda: any(f"the context is {context} tokens: " in line for line in bare.log))
    reply = bare.stub.Predict(asked(context - 1), timeout=WAIT)
    assert (reply.prompt_tokens, reply.tokens) == (context - 1, 1)
    assert f"{context}" in refusal(bare, asked(context + 1))


def test_with_enough_memory_it_is_the_models_own(bare: Backend) -> None:
    assert load(bare) == OWN


def test_a_configured_size_is_kept_whatever_memory_holds(bare: Backend) -> None:
    assert load(bare, "memory_limit_mib:14", size=8000) == 8000
