"""Requests as LocalAI fills them in if the user's YAML sets nothing."""

from __future__ import annotations

from typing import Any

from wire import backend_pb2 as pb


def predict_options(**changes: Any) -> pb.PredictOptions:
    """A request without messages, with every default that the host sends."""
    options = pb.PredictOptions(
        Prompt="Once upon a time",
        Seed=81_985_529,
        Threads=4,
        Batch=512,
        Temperature=0.9,
        TopP=0.95,
        TypicalP=1.0,
        TailFreeSamplingZ=1.0,
        MirostatETA=0.1,
        MirostatTAU=5.0,
        PromptCacheAll=True,
        MMap=True,
        UseTokenizerTemplate=True,
        ModelIdentity="",
    )
    options.MergeFrom(pb.PredictOptions(**changes))
    return options


def model_options(**changes: Any) -> pb.ModelOptions:
    """A load with every default that the host sends."""
    options = pb.ModelOptions(
        Model="mlx-community/tiny",
        ModelFile="/models/mlx-community/tiny",
        ModelPath="/models",
        ContextSize=4096,
        Seed=81_985_529,
        NBatch=512,
        Threads=4,
        MMap=True,
        NGPULayers=99_999_999,
        FlashAttention="auto",
        Options=["tool_parser:hermes", "reasoning_parser:qwen3"],
    )
    options.MergeFrom(pb.ModelOptions(**changes))
    return options
