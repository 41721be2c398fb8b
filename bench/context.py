"""The context of a load without `context_size`, against the tokens that the memory left could hold.

The rest of the memory is for the smallest prefill pass, and for choosing a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm

from backend.engine.caching import kv
from backend.engine.units import MIB
from bench.process import process
from bench.report import Figure, at_least
from wire import backend_pb2 as pb

LEFT_MIB = 256  # memory beside the weights


def measure(model: Path) -> Iterator[Figure]:
    """Measure the context, after the longest prompt has been served."""
    network = mlx_lm.load(str(model), lazy=True)[0]
    network.set_dtype(mx.float32)
    per_token = kv.cost(network).per_token
    with process() as (_, stub):
        request = pb.ModelOptions(Model=model.name, ModelFile=str(model))
        stub.LoadModel(request)
        weights = dict(stub.Status(pb.HealthMessage()).memory.breakdown)["weights"]
        request.Options.append(f"memory_limit_mib:{weights // MIB + LEFT_MIB}")
        _, call = stub.LoadModel.with_call(request)
        context = int(dict(call.trailing_metadata())["mlx-context-size"])
        words = "word " * (context - 20)
        reply = stub.Predict(pb.PredictOptions(Prompt=words, Tokens=1, IgnoreEOS=True))
    yield at_least(
        "tokens of context that fit / tokens whose KV fits",
        context * per_token / (LEFT_MIB * MIB),
        0.7,
        f"{context} tokens; a prompt of {reply.prompt_tokens} was served",
    )
