"""Keys of LocalAI's model files that this gateway knows and does not act on.

A file that was written for LocalAI is taken over as it is. A key that means nothing to a language
model on MLX is left out; one whose effect would be missed is refused, with what to do instead.
Both tables are part of docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLACES = "MLX places memory and work itself"
_CHECKPOINT = "the checkpoint's config.json says it"
_OTHER_KIND = "for models that make images, sound or video"
_HOST = "belongs to another part of LocalAI"

NEUTRAL: Mapping[str, str] = {
    "usage": "text for a gallery",
    "known_usecases": "the backend says what the model can do",
    "known_input_modalities": "the backend says what the model can do",
    "known_output_modalities": "the backend says what the model can do",
    "download_files": "models are fetched from the hub by the backend",
    "artifacts": "models are fetched from the hub by the backend",
    "f16": "`dtype`, or the platform, decides the type of the weights",
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
    "gpu_memory_utilization": "the option memory_limit_mib bounds memory",
    "flash_attention": "MLX chooses its attention kernels itself",
    "batch": "the option prefill_chunk cuts prompts",
    "rms_norm_eps": _CHECKPOINT,
    "ngqa": _CHECKPOINT,
    "debug": "MLX_BACKEND_LOG sets the log level",
    "disable_log_stats": "MLX_BACKEND_LOG sets the log level",
    "function": "tool calls are read in the model's own format, which the backend detects",
    "prompt_cache_all": "prompts are always cached; see the option prompt_cache_mib",
    "prompt_cache_ro": "prompts are always cached; see the option prompt_cache_mib",
    "mirostat_eta": "belongs to mirostat, which is refused",
    "mirostat_tau": "belongs to mirostat, which is refused",
    "grpc": "a backend that ends is noticed at once, and one that starts has a minute",
    "feature_flags": _HOST,
    "pipeline": _HOST,
    "mcp": _HOST,
    "agent": _HOST,
    "cuda": _OTHER_KIND,
    "diffusers": _OTHER_KIND,
    "step": _OTHER_KIND,
    "tts": _OTHER_KIND,
    "cfg_scale": _OTHER_KIND,
    "parameters.batch": "the option prefill_chunk cuts prompts",
    "parameters.n_keep": "contexts are never shifted",
    "parameters.language": _OTHER_KIND,
    "parameters.translate": _OTHER_KIND,
    "parameters.clip_skip": _OTHER_KIND,
    "parameters.negative_prompt_scale": "belongs to negative_prompt, which is refused",
    "parameters.encoding_format": "every request says it",
}

REFUSED: Mapping[str, str] = {
    "alias": "write this name into the list `aliases` of the model itself",
    "failover": "a request is served by one model; leave it out",
    "router": "a request is served by one model; leave it out",
    "proxy": "only backends that speak backend.proto are served",
    "roles": "a request may say role_mapping",
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
    "parameters.n": "every request says it",
    "parameters.echo": "every request says it",
    "parameters.logprobs": "every request says it",
    "parameters.top_logprobs": "every request says it",
    "parameters.tfz": "use top_p or min_p",
    "parameters.negative_prompt": "no backend of ours reads it",
    "template.chat": "the checkpoint's own template is used; leave it out",
    "template.chat_message": "the checkpoint's own template is used; leave it out",
    "template.completion": "prompts of completions are sent as they are; leave it out",
    "template.edit": "there is no edits endpoint; leave it out",
    "template.function": "the checkpoint's own template is used; leave it out",
    "template.multimodal": "the checkpoint's own template is used; leave it out",
    "template.reply_prefix": "the checkpoint's own template is used; leave it out",
    "template.join_chat_messages_by_character": "the checkpoint's own template is used; leave it"
    " out",
}


def without_foreign(given: Any, section: str = "") -> Any:
    """A section without the neutral keys. Raises ValueError for a key that is refused.

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
