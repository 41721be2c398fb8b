"""What becomes of each field of PredictOptions that no generation reads.

A field is read by `backend.rpc.requests`, refused by value in `REFUSED`, or listed in `UNUSED`
with the reason why it means nothing here. A test walks the descriptor: a field without a place
fails it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from backend.rpc.neutral import Refused, empty, one_of

_LATER = "this version does not apply it"
_TEXT_ONLY = "the backend serves text models only"


def _off_share(value: float) -> bool:
    """A probability mass that keeps every token: 0 is unset, 1 and more is everything."""
    return value == 0 or 1 <= value < math.inf


REFUSED: Mapping[str, Refused] = {
    "TailFreeSamplingZ": Refused(_off_share, _LATER, "send 1 and use TopP or MinP"),
    "Mirostat": Refused(one_of(0), _LATER, "send 0 and use TopP or MinP"),
    "NegativePrompt": Refused(empty, _LATER, "leave it empty"),
    "Images": Refused(empty, _TEXT_ONLY, "send none"),
    "Videos": Refused(empty, _TEXT_ONLY, "send none"),
    "Audios": Refused(empty, _TEXT_ONLY, "send none"),
}

_AT_LOAD = "fixed when the model is loaded"
_DEVICE = "MLX places memory and work itself"
_CACHE = "earlier prompts are cached in memory without being asked, with the same result"
_MIROSTAT = "belongs to Mirostat, which is refused"
_EMBEDDING = "input of the Embedding RPC"

UNUSED: Mapping[str, str] = {
    "ModelIdentity": "compared before the request gets here (backend.rpc.identity)",
    "Threads": _DEVICE,
    "Batch": "prefill is cut by the prefill_chunk setting; the result does not depend on it",
    "NKeep": "says what to keep when a context is shifted, and contexts are never shifted here",
    "F16KV": _AT_LOAD,
    "MLock": _DEVICE,
    "MMap": _DEVICE,
    "MainGPU": _DEVICE,
    "TensorSplit": _DEVICE,
    "DebugMode": "MLX_BACKEND_LOG sets the log level",
    "Debug": "MLX_BACKEND_LOG sets the log level",
    "PromptCacheAll": _CACHE,
    "PromptCacheRO": _CACHE,
    "PromptCachePath": _CACHE,
    "RopeFreqBase": _AT_LOAD,
    "RopeFreqScale": _AT_LOAD,
    "NDraft": "counts guesses of a draft model, and LoadModel refuses those",
    "PenalizeNL": "Penalty counts newlines like any token, as llama.cpp does today",
    "MirostatETA": _MIROSTAT,
    "MirostatTAU": _MIROSTAT,
    "NegativePromptScale": "belongs to NegativePrompt, which is refused",
    "Embeddings": _EMBEDDING,
    "EmbeddingTokens": _EMBEDDING,
}
