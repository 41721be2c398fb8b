"""Keys of LocalAI's model files that this gateway knows and does not act on.

Files written for LocalAI work unchanged. A key that means nothing for a language model on MLX is
ignored; a key whose effect would be missed is refused, with advice what to do instead.
Both tables are part of docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLACES = "MLX manages memory and threads itself"
_CHECKPOINT = "the value comes from the checkpoint's config.json"
_OTHER_KIND = "for models that generate images, sound or video"
_HOST = "belongs to another part of LocalAI"

NEUTRAL: Mapping[str, str] = {
    "usage": "a text for the model gallery",
    "known_usecases": "the backend reports what the model can do",
    "known_input_modalities": "the backend reports what the model can do",
    "known_output_modalities": "the backend reports what the model can do",
    "download_files": "the backend downloads models from the hub",
    "artifacts": "the backend downloads models from the hub",
    "f16": "`dtype`, or else the platform, sets the type of the weights",
    "threads": _PLACES,
    "mmap": _PLACES,
    "mmlock": _PLACES,
    "low_vram": _PLACES,
    "gpu_layers": _PLACES,
    "numa": _PLACES,
    "no_mulmatq": _PLACES,
    "main_gpu": _PLACES,
    "tensor_split": _PLACES,
    "no_kv_offloading": _PLACES,
    "enforce_eager": _PLACES,
    "swap_space": _PLACES,
    "gpu_memory_utilization": "the option memory_limit_mib limits memory",
    "flash_attention": "MLX chooses its attention kernels itself",
    "batch": "the option prefill_chunk sets the size of prefill passes",
    "rms_norm_eps": _CHECKPOINT,
    "ngqa": _CHECKPOINT,
    "debug": "MLX_BACKEND_LOG sets the log level",
    "disable_log_stats": "MLX_BACKEND_LOG sets the log level",
    "function": "tool calls are read in the model's own format, which the backend detects",
    "prompt_cache_all": "prompts are always cached; see the option prompt_cache_mib",
    "prompt_cache_ro": "prompts are always cached; see the option prompt_cache_mib",
    "mirostat_eta": "belongs to mirostat, which is refused",
    "mirostat_tau": "belongs to mirostat, which is refused",
    "grpc": "the gateway notices at once when a backend ends, and gives it a minute to start",
    "feature_flags": _HOST,
    "pipeline": _HOST,
    "mcp": _HOST,
    "agent": _HOST,
    "cuda": _OTHER_KIND,
    "diffusers": _OTHER_KIND,
    "step": _OTHER_KIND,
    "tts": _OTHER_KIND,
    "cfg_scale": _OTHER_KIND,
    "parameters.batch": "the option prefill_chunk sets the size of prefill passes",
    "parameters.n_keep": "contexts are never shifted",
    "parameters.language": _OTHER_KIND,
    "parameters.translate": _OTHER_KIND,
    "parameters.clip_skip": _OTHER_KIND,
    "parameters.negative_prompt_scale": "belongs to negative_prompt, which is refused",
    "parameters.encoding_format": "set by each request",
}

REFUSED: Mapping[str, str] = {
    "alias": "write this name into the list `aliases` of the model itself",
    "failover": "a request is served by one model; leave it out",
    "router": "a request is served by one model; leave it out",
    "proxy": "only backends that speak backend.proto are served",
    "roles": "send role_mapping with the request",
    "system_prompt": "send it as the first of the request's messages",
    "grammar": "send a grammar or a response_format with the request",
    "cutstrings": "answers are not edited; use stopwords",
    "extract_regex": "answers are not edited; use stopwords",
    "trimspace": "answers are not edited; use stopwords",
    "trimsuffix": "answers are not edited; use stopwords",
    "mirostat": "use top_p or min_p",
    "prompt_cache_path": "use the option prompt_cache_dir",
    "concurrency_groups": "use the gateway's limits on loaded models and memory",
    "limits": "use the option max_queue",
    "compression": "requests are not edited; leave it out",
    "pii": "requests are not edited; leave it out",
    "parameters.n": "set by each request",
    "parameters.echo": "set by each request",
    "parameters.logprobs": "set by each request",
    "parameters.top_logprobs": "set by each request",
    "parameters.tfz": "use top_p or min_p",
    "parameters.negative_prompt": "the backend does not support it; leave it out",
    "template.chat": "the checkpoint's own template is used; leave it out",
    "template.chat_message": "the checkpoint's own template is used; leave it out",
    "template.completion": "completion prompts are sent unchanged; leave it out",
    "template.edit": "there is no edits endpoint; leave it out",
    "template.function": "the checkpoint's own template is used; leave it out",
    "template.multimodal": "the checkpoint's own template is used; leave it out",
    "template.reply_prefix": "the checkpoint's own template is used; leave it out",
    "template.join_chat_messages_by_character": "the checkpoint's own template is used; leave it"
    " out",
}


def without_foreign(given: Any, section: str = "") -> Any:
    """The section without ignored keys. Raises ValueError for a key that is refused.

    An empty, zero or false value asks for nothing, so it is never refused.
    """
    if not isinstance(given, dict):
        return given
    for key, value in given.items():
        advice = REFUSED.get(f"{section}{key}")
        if advice is not None and value not in (None, "", 0, [], {}):
            raise ValueError(f"{section}{key} is not applied by this gateway: {advice}")
    known = NEUTRAL.keys() | REFUSED.keys()
    return {key: value for key, value in given.items() if f"{section}{key}" not in known}
