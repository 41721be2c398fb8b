"""States which fields of a request are refused, or have no effect (neutral); all others are used.

These are the requests to generate and to load. Hosts fill most fields from their configuration, so
most fields arrive with values that mean "off"; those are accepted. If ignoring a field would change
what the user gets, any other value of the field is refused. docs/fields.md describes the treatment
of every field (`python -m tests.rpc.doc_tables`); tests compare the tables with the protobuf
descriptors and the code that reads the fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from backend.engine.errors import InvalidRequest
from common.field_names import MODEL_KEYS, in_snake_case, named, written
from common.field_table import EMPTY, FieldTable, Off, Refused, each, one_of
from wire import backend_pb2 as pb


def require_neutral(table: FieldTable, message: Any) -> None:
    """Raise InvalidRequest for a refused field that is set."""
    if name := table.first_refused({name: getattr(message, name) for name in table.refused}):
        row, value = table.refused[name], getattr(message, name)
        # `%g` rounds a large integer. A text may be a user's, and messages are logged.
        written = f"{value:g}" if isinstance(value, float) else str(value)
        given = f"is {written}" if isinstance(value, (int, float)) and value else "is set"
        raise InvalidRequest(f"{named(name)} {given}, but {row.why}: {row.instead}")


def _empty_or_word(*words: str) -> Off:
    return Off(
        lambda value: value.strip().lower() in ("", *words),
        " or ".join(("empty", *(f"`{word}`" for word in words))),
    )


# A probability mass that keeps every token: 0 means unset, 1 and above means all.
_OFF_SHARE = Off(lambda value: value == 0 or 1 <= value < math.inf, "0, or 1 or more")

_LATER = "this version does not support it"
_DEVICE = "MLX manages memory and threads itself"
_ROPE = "position encoding is set by the checkpoint's config.json"
_LOG = "MLX_BACKEND_LOG sets the log level"
_CHUNK = "the option prefill_chunk sets the size of prefill passes"
_WHOLE = "for lazy grammars; here Grammar applies from the start of the answer"

PREDICT_OPTIONS = FieldTable(
    refused={
        "TailFreeSamplingZ": Refused("send 1 and use TopP or MinP", _OFF_SHARE, _LATER),
        "Mirostat": Refused("send 0 and use TopP or MinP", one_of(0), _LATER),
        "NegativePrompt": Refused("leave it empty", EMPTY, _LATER),
    },
    neutral=each(
        {
            _DEVICE: "Threads MLock MMap MainGPU TensorSplit",
            f"{_CHUNK}; results do not change": "Batch",
            "applies when a context is shifted, and contexts are never shifted here": "NKeep",
            "fixed when the model is loaded": "F16KV RopeFreqBase RopeFreqScale",
            _LOG: "DebugMode Debug",
            "Penalty counts newlines like any other token, as in llama.cpp": "PenalizeNL",
            "belongs to Mirostat, which is refused": "MirostatETA MirostatTAU",
            "belongs to NegativePrompt, which is refused": "NegativePromptScale",
        }
    ),
)

MODEL_OPTIONS = FieldTable(
    refused={
        "LoraBase": Refused(
            "leave it empty", EMPTY, "adapters are applied to the weights of the model itself"
        ),
        "MMProj": Refused(
            "remove mmproj", EMPTY, "an MLX vision model includes its vision encoder"
        ),
        "Quantization": Refused(
            "choose a quantised checkpoint", EMPTY, "quantisation is part of an MLX checkpoint"
        ),
        "LoadFormat": Refused(
            "leave it empty", _empty_or_word("auto", "safetensors"), "only safetensors are read"
        ),
        "Tokenizer": Refused("leave it empty", EMPTY, "the checkpoint's own tokenizer is used"),
        "Overrides": Refused("edit the checkpoint's config.json", EMPTY, _LATER),
        "RopeScaling": Refused("leave it empty", _empty_or_word("none"), _ROPE),
        "RopeFreqBase": Refused("send 0", one_of(0), _ROPE),
        "RopeFreqScale": Refused("send 0", one_of(0, 1), _ROPE),
        "YarnExtFactor": Refused("send 0", one_of(0, -1), _ROPE),
        "YarnAttnFactor": Refused("send 0", one_of(0, 1), _ROPE),
        "YarnBetaFast": Refused("send 0", one_of(0, 32), _ROPE),
        "YarnBetaSlow": Refused("send 0", one_of(0, 1), _ROPE),
        "TensorParallelSize": Refused("send 0 or 1", one_of(0, 1), "one process serves the model"),
    },
    neutral=each(
        {
            "each request has its own": "Seed",
            _CHUNK: "NBatch",
            _DEVICE: "Threads MLock MMap NUMA LowVRAM NGPULayers MainGPU TensorSplit NoMulMatQ"
            " NoKVOffload EnforceEager SwapSpace",
            "DType, or else the platform, sets the type of weights and cache": "F16Memory",
            "MLX chooses its attention kernels itself": "FlashAttention",
            "Score is always available": "EnableScore",
            "the option memory_limit_mib limits memory": "GPUMemoryUtilization",
            "the value comes from the checkpoint's config.json": "RMSNormEps NGQA",
            _WHOLE: "GrammarTriggers",
            _LOG: "DisableLogStatus",
            "no host sets it": "VocabOnly",
            "a class name for another engine; the kind of model comes from the checkpoint": "Type",
            "for models that generate images": "PipelineType SchedulerType CUDA CFGScale IMG2IMG"
            " CLIPModel CLIPSubfolder CLIPSkip ControlNet",
            "for models that generate audio": "AudioPath",
            "for LocalAI's cloud proxy": "Proxy",
        }
    ),
)


def _without_media(rpc: str, field: str) -> dict[str, Refused]:
    """Return the fields that a call about one text, in `field`, does not read."""
    unread = f"{rpc} does not read it"
    media = Refused(f"send none, and text as {field}", why=unread)
    messages = Refused(f"render the conversation, and send it as {field}", why=unread)
    return {"Messages": messages, "Images": media, "Videos": media, "Audios": media}


TOKENIZE_STRING = FieldTable(_without_media("TokenizeString", "Prompt"))
EMBEDDING = FieldTable(
    _without_media("Embedding", "Embeddings")
    | {"Prompt": Refused("send it as Embeddings", why="Embedding does not read it")}
)


# Fields that a model file cannot set: they belong to a request, or locate the model.
_WITHOUT_KEY = frozenset(
    "Prompt Messages UseTokenizerTemplate Metadata Images Videos Audios Tools ToolChoice Grammar"
    " CorrelationId ModelIdentity EmbeddingTokens Model ModelFile ModelPath".split()
)
# Keys that are not the field's name in snake case: those of ModelOptions, then those of requests.
_OTHER_KEYS = MODEL_KEYS | {
    "LimitImagePerPrompt": "limit_mm_per_prompt.image",
    "LimitVideoPerPrompt": "limit_mm_per_prompt.video",
    "LimitAudioPerPrompt": "limit_mm_per_prompt.audio",
    "Tokens": "max_tokens",
    "StopPrompts": "stopwords",
    "Penalty": "repeat_penalty",
    "Repeat": "repeat_last_n",
    "NDraft": "n_draft",
    "TailFreeSamplingZ": "tfz",
}
# The author of a model file, or of a request with the same names, does not know the protocol. So
# messages contain both names: `context_size (ContextSize)`.
YAML_KEYS: Mapping[str, str] = {
    field.name: _OTHER_KEYS.get(field.name, in_snake_case(field.name))
    for message, table in ((pb.ModelOptions, MODEL_OPTIONS), (pb.PredictOptions, PREDICT_OPTIONS))
    for field in message.DESCRIPTOR.fields
    if field.name not in table.neutral and field.name not in _WITHOUT_KEY
}


def message_with_keys(message: str) -> str:
    """Return the message for a host, with the YAML key at the first mention of each field."""
    seen: set[str] = set()

    def name_of(field: str) -> str:
        first = field in YAML_KEYS and field not in seen
        seen.add(field)
        return f"{YAML_KEYS[field]} ({field})" if first else field

    return written(message, name_of)
