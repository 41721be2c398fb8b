"""Keys of LocalAI's model files that this gateway knows but does not use.

Files written for LocalAI work unchanged. A key without meaning for a language model on MLX is
ignored; a key whose effect would be missed is refused, with advice on what to do instead. Both
tables are part of docs/models.md.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from common.field_table import FieldTable, Refused, each

_NEUTRAL = each(
    {
        "a text for the model gallery": "usage",
        "the backend reports what the model can do": "known_usecases known_input_modalities"
        " known_output_modalities",
        "the backend downloads models from the hub": "download_files artifacts",
        "`dtype`, or else the platform, sets the type of the weights": "f16",
        "MLX manages memory and threads itself": "threads mmap mmlock low_vram gpu_layers numa"
        " no_mulmatq main_gpu tensor_split no_kv_offloading enforce_eager swap_space",
        "the option memory_limit_mib limits memory": "gpu_memory_utilization",
        "MLX chooses its attention kernels itself": "flash_attention",
        "the option prefill_chunk sets the size of prefill passes": "batch parameters.batch",
        "the value comes from the checkpoint's config.json": "rms_norm_eps ngqa",
        "MLX_BACKEND_LOG sets the log level": "debug disable_log_stats",
        "tool calls are read in the model's own format, which the backend detects": "function",
        "prompts are always cached; see the option prompt_cache_mib": "prompt_cache_all"
        " prompt_cache_ro",
        "belongs to mirostat, which is refused": "mirostat_eta mirostat_tau",
        "the gateway notices the end of a backend, and gives it a minute to start": "grpc",
        "belongs to another part of LocalAI": "feature_flags pipeline mcp agent pii_detection",
        "for models that generate images, audio or video": "cuda diffusers step tts cfg_scale"
        " parameters.language parameters.translate parameters.clip_skip",
        "contexts are never shifted": "parameters.n_keep",
        "belongs to negative_prompt, which is refused": "parameters.negative_prompt_scale",
        "set by each request": "parameters.encoding_format",
    }
)
_REFUSED = each(
    {
        "write this name into the list `aliases` of the model itself": "alias",
        "a request is served by one model; leave it out": "failover router",
        "only backends that speak backend.proto are served": "proxy",
        "send role_mapping with the request": "roles",
        "send it as the first of the request's messages": "system_prompt",
        "send a grammar or a response_format with the request": "grammar",
        "answers are not edited; use stopwords": "cutstrings extract_regex trimspace trimsuffix",
        "use top_p or min_p": "mirostat parameters.tfz",
        "use the option prompt_cache_dir": "prompt_cache_path",
        "use the gateway's limits on loaded models and memory": "concurrency_groups",
        "use the option max_queue": "limits",
        "requests are not edited; leave it out": "compression pii",
        "set by each request": "parameters.n parameters.echo parameters.logprobs"
        " parameters.top_logprobs",
        "the backend does not support it; leave it out": "parameters.negative_prompt",
        "the checkpoint's own template is used; leave it out": "template.chat"
        " template.chat_message template.function template.multimodal template.reply_prefix"
        " template.join_chat_messages_by_character",
        "completion prompts are sent unchanged; leave it out": "template.completion",
        "there is no edits endpoint; leave it out": "template.edit",
    }
)


KEYS = FieldTable({key: Refused(advice) for key, advice in _REFUSED.items()}, _NEUTRAL)


def without_foreign(given: Any, section: str = "") -> Any:
    """Return the section without ignored keys. Raises ValueError for a key that is refused.

    A key whose value is empty, zero or false is never refused.
    """
    if not isinstance(given, dict):
        return given
    keys = {f"{section}{key}": value for key, value in given.items()}
    if name := KEYS.first_refused(keys):
        raise ValueError(f"{name} is not applied by this gateway: {KEYS.refused[name].instead}")
    return {key.removeprefix(section): value for key, value in KEYS.without(keys).items()}


def foreign(place: str = "") -> Any:
    """Return a validator that removes ignored keys from the fields of a model."""
    return model_validator(mode="before")(lambda given: without_foreign(given, place))
