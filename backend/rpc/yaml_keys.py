"""The names of the protocol's fields in model YAML files of LocalAI and the gateway.

An error message is read by the author of such a file, or of a request with the same names, who does
not know the protocol. So messages contain both names: `context_size (ContextSize)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.field_names import written

YAML_KEYS: Mapping[str, str] = {
    # ModelOptions
    "ContextSize": "context_size",
    "MaxModelLen": "max_model_len",
    "DType": "dtype",
    "TrustRemoteCode": "trust_remote_code",
    "Embeddings": "embeddings",
    "Reranking": "reranking",
    "Options": "options",
    "EngineArgs": "engine_args",
    "CacheTypeKey": "cache_type_k",
    "CacheTypeValue": "cache_type_v",
    "LoraAdapter": "lora_adapter",
    "LoraAdapters": "lora_adapters",
    "LoraScale": "lora_scale",
    "LoraScales": "lora_scales",
    "LoraBase": "lora_base",
    "DraftModel": "draft_model",
    "MMProj": "mmproj",
    "Quantization": "quantization",
    "LoadFormat": "load_format",
    "Tokenizer": "tokenizer",
    "Overrides": "overrides",
    "RopeScaling": "rope_scaling",
    "RopeFreqBase": "rope_freq_base",
    "RopeFreqScale": "rope_freq_scale",
    "YarnExtFactor": "yarn_ext_factor",
    "YarnAttnFactor": "yarn_attn_factor",
    "YarnBetaFast": "yarn_beta_fast",
    "YarnBetaSlow": "yarn_beta_slow",
    "TensorParallelSize": "tensor_parallel_size",
    "LimitImagePerPrompt": "limit_mm_per_prompt.image",
    "LimitVideoPerPrompt": "limit_mm_per_prompt.video",
    "LimitAudioPerPrompt": "limit_mm_per_prompt.audio",
    # PredictOptions: keys of `parameters`, and fields of LocalAI's requests
    "Tokens": "max_tokens",
    "StopPrompts": "stopwords",
    "IgnoreEOS": "ignore_eos",
    "Temperature": "temperature",
    "TopP": "top_p",
    "TopK": "top_k",
    "MinP": "min_p",
    "TypicalP": "typical_p",
    "Seed": "seed",
    "Penalty": "repeat_penalty",
    "Repeat": "repeat_last_n",
    "FrequencyPenalty": "frequency_penalty",
    "PresencePenalty": "presence_penalty",
    "LogitBias": "logit_bias",
    "PromptCachePath": "prompt_cache_path",
    "PromptCacheAll": "prompt_cache_all",
    "PromptCacheRO": "prompt_cache_ro",
    "NDraft": "n_draft",
    "Logprobs": "logprobs",
    "TopLogprobs": "top_logprobs",
    "TailFreeSamplingZ": "tfz",
    "Mirostat": "mirostat",
    "NegativePrompt": "negative_prompt",
}


def message_with_keys(message: str) -> str:
    """The message for a host, with the YAML key at the first mention of each field."""
    seen: set[str] = set()

    def name_of(field: str) -> str:
        first = field in YAML_KEYS and field not in seen
        seen.add(field)
        return f"{YAML_KEYS[field]} ({field})" if first else field

    return written(message, name_of)
