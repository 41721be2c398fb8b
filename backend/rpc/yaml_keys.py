"""Maps the protocol's fields to their names in model YAML files of LocalAI and the gateway.

An error message is read by the author of such a file, or of a request with the same names, who does
not know the protocol. So messages contain both names: `context_size (ContextSize)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.rpc.fields import MODEL_OPTIONS, PREDICT_OPTIONS
from common.field_names import in_snake_case, written

# Fields that a file cannot set: they belong to a request, or locate the model.
_WITHOUT_KEY = frozenset(
    "Prompt Messages UseTokenizerTemplate Metadata Images Videos Audios Tools ToolChoice Grammar"
    " CorrelationId ModelIdentity EmbeddingTokens Model ModelFile ModelPath".split()
)
# Keys that are not the field's name in snake case: those of ModelOptions, then those of requests.
_OTHER_KEYS = {
    "DType": "dtype",
    "CacheTypeKey": "cache_type_k",
    "CacheTypeValue": "cache_type_v",
    "MMProj": "mmproj",
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
YAML_KEYS: Mapping[str, str] = {
    name: _OTHER_KEYS.get(name, in_snake_case(name))
    for table in (MODEL_OPTIONS, PREDICT_OPTIONS)
    for name in (*table.used, *table.refused)
    if name not in _WITHOUT_KEY
}


def message_with_keys(message: str) -> str:
    """Return the message for a host, with the YAML key at the first mention of each field."""
    seen: set[str] = set()

    def name_of(field: str) -> str:
        first = field in YAML_KEYS and field not in seen
        seen.add(field)
        return f"{YAML_KEYS[field]} ({field})" if first else field

    return written(message, name_of)
