"""What becomes of each field of PredictOptions that no generation reads.

A field is read by `backend.rpc.requests`, refused by value in `REFUSED`, honoured before a request
gets there (`ELSEWHERE`), or listed in `UNUSED` with the reason why it means nothing here. A test
walks the descriptor: a field without a place fails it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from backend.rpc.neutral import Neutral, Refused, empty, one_of

_LATER = "this version does not apply it"

# A probability mass that keeps every token: 0 is unset, 1 and more is everything.
_off_share = Neutral(lambda value: value == 0 or 1 <= value < math.inf, "0, or 1 and more")


REFUSED: Mapping[str, Refused] = {
    "TailFreeSamplingZ": Refused(_off_share, _LATER, "send 1 and use TopP or MinP"),
    "Mirostat": Refused(one_of(0), _LATER, "send 0 and use TopP or MinP"),
    "NegativePrompt": Refused(empty, _LATER, "leave it empty"),
}

_AT_LOAD = "fixed when the model is loaded"
_DEVICE = "MLX places memory and work itself"
_MIROSTAT = "belongs to Mirostat, which is refused"

ELSEWHERE: Mapping[str, str] = {
    "ModelIdentity": "compared with the loaded model's before anything else",
    "Embeddings": "the text that the Embedding RPC turns into a vector; no generation reads it",
    "EmbeddingTokens": "the same in token ids, taken as they are; one of the two is sent",
}

UNUSED: Mapping[str, str] = {
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
    "RopeFreqBase": _AT_LOAD,
    "RopeFreqScale": _AT_LOAD,
    "PenalizeNL": "Penalty counts newlines like any token, as llama.cpp does today",
    "MirostatETA": _MIROSTAT,
    "MirostatTAU": _MIROSTAT,
    "NegativePromptScale": "belongs to NegativePrompt, which is refused",
}
