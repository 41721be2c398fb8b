"""Fields of other servers that would change the answer and cannot be honoured: refused by name.

Clients often send the value that means "off"; that passes. A test holds both sides of every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class Refused:
    """Which values ask for nothing (null always does), and what to do instead of others."""

    instead: str
    off: tuple[Any, ...] = ()


_SAMPLER = "this sampler is not there; use top_p, min_p, typical_p or xtc_probability"
_AT_LOAD = "it is set in the model's file"
_TEMPLATE = "the model's chat template decides; leave it out"
_TEXT = "answers are text; leave it out"
_RAW = "it is not told; leave it out"

COMMON: Mapping[str, Refused] = {
    # llama.cpp server
    "dynatemp_range": Refused(_SAMPLER, (0,)),
    "dynatemp_exponent": Refused("it belongs to dynatemp_range, which is not there", (1,)),
    "dry_multiplier": Refused(_SAMPLER, (0,)),
    "dry_base": Refused("it belongs to dry_multiplier, which is not there", (1.75,)),
    "dry_allowed_length": Refused("it belongs to dry_multiplier, which is not there", (2,)),
    "dry_penalty_last_n": Refused("it belongs to dry_multiplier, which is not there", (-1, 0)),
    "dry_sequence_breakers": Refused(
        "it belongs to dry_multiplier, which is not there", ([], ["\n", ":", '"', "*"])
    ),
    "mirostat": Refused(_SAMPLER, (0,)),
    "mirostat_tau": Refused("it belongs to mirostat, which is not there", (0, 5)),
    "mirostat_eta": Refused("it belongs to mirostat, which is not there", (0, 0.1)),
    "tfs_z": Refused(_SAMPLER, (0, 1)),
    "top_n_sigma": Refused(_SAMPLER, (-1, 0)),
    "top_a": Refused(_SAMPLER, (0,)),
    "epsilon_cutoff": Refused(_SAMPLER, (0,)),
    "eta_cutoff": Refused(_SAMPLER, (0,)),
    "smoothing_factor": Refused(_SAMPLER, (0,)),
    "samplers": Refused("the order of samplers is fixed; leave it out"),
    "t_max_predict_ms": Refused("bound an answer by max_tokens", (0, -1)),
    "n_indent": Refused("leave it out", (0,)),
    "post_sampling_probs": Refused("log-probabilities are those of the model", (False,)),
    "timings_per_token": Refused(_RAW, (False,)),
    "return_tokens": Refused(_RAW, (False,)),
    "return_progress": Refused(_RAW, (False,)),
    "response_fields": Refused(_RAW, ([],)),
    "lora": Refused(f"{_AT_LOAD}: ask for the model that has it", ([],)),
    "image_data": Refused("send images as image_url parts of a message", ([],)),
    "grammar_lazy": Refused("a grammar holds the answer from its start", (False,)),
    "grammar_triggers": Refused("a grammar holds the answer from its start", ([],)),
    "preserved_tokens": Refused("leave it out", ([],)),
    # vLLM
    "use_beam_search": Refused("answers are sampled; leave it out", (False,)),
    "length_penalty": Refused("it belongs to beam search, which is not there", (1,)),
    "early_stopping": Refused("it belongs to beam search, which is not there", (False,)),
    "stop_token_ids": Refused("send the tokens' text as stop", ([],)),
    "allowed_token_ids": Refused("hold the answer by guided_choice or a grammar", ([],)),
    "bad_words": Refused("use logit_bias with -100", ([],)),
    "include_stop_str_in_output": Refused("the answer ends before it", (False,)),
    "skip_special_tokens": Refused(
        "special tokens that are no markup of the chat format are shown; leave it out", (False,)
    ),
    "spaces_between_special_tokens": Refused(
        "nothing is put between tokens; leave it out", (False,)
    ),
    "truncate_prompt_tokens": Refused("shorten the prompt", (-1,)),
    "prompt_logprobs": Refused("use /v1/completions with echo and logprobs"),
    "return_tokens_as_token_ids": Refused("tokens are told as text", (False,)),
    "return_token_ids": Refused(_RAW, (False,)),
    "logits_processors": Refused("leave it out", ([],)),
    "cache_salt": Refused("prefixes of all requests are remembered together"),
    "kv_transfer_params": Refused("one process serves the model"),
    "vllm_xargs": Refused("leave it out", ({},)),
    "guided_whitespace_pattern": Refused("say it in a grammar"),
}

CHAT: Mapping[str, Refused] = {
    **COMMON,
    "audio": Refused(_TEXT),
    "modalities": Refused(_TEXT, ([], ["text"])),
    "prediction": Refused("leave it out: drafts come from a draft model or from the prompt"),
    "web_search_options": Refused("the gateway does not search; offer a tool that does"),
    "moderation": Refused("nothing is moderated; leave it out"),
    "add_special_tokens": Refused(_TEMPLATE, (False,)),
    "echo": Refused("use /v1/completions to see the prompt", (False,)),
    "chat_template": Refused(f"{_TEMPLATE}, and set variables by chat_template_kwargs", ("",)),
    "documents": Refused("write them into a message", ([],)),
    "mm_processor_kwargs": Refused("leave it out", ({},)),
    "reasoning_format": Refused(
        "reasoning is told as reasoning_content; send include_reasoning false to leave it out",
        ("auto", "deepseek"),
    ),
    "thinking_budget": Refused("bound an answer by max_tokens"),
    "thinking_budget_tokens": Refused("bound an answer by max_tokens", (-1,)),
    "thinking_token_budget": Refused("bound an answer by max_tokens"),
    "thinking_forced_open": Refused("use chat_template_kwargs", (False,)),
    "reasoning_budget": Refused("bound an answer by max_tokens", (-1,)),
    "reasoning_in_content": Refused("reasoning is told as reasoning_content", (False,)),
    "parse_tool_calls": Refused("calls are always told as tool_calls", (True,)),
    "separate_reasoning": Refused("reasoning is told as reasoning_content", (True,)),
    "stream_reasoning": Refused("reasoning is always streamed", (True,)),
    "best_of": Refused("send n", (1,)),
    "prompt": Refused("use /v1/completions"),
    "suffix": Refused("use /v1/completions", ("",)),
}

COMPLETION: Mapping[str, Refused] = {
    **COMMON,
    "suffix": Refused("filling in between is not there; send the whole prompt", ("",)),
    "add_special_tokens": Refused("send token ids to decide on every token", (True,)),
    "messages": Refused("use /v1/chat/completions"),
    "tools": Refused("use /v1/chat/completions", ([],)),
    "input_extra": Refused("filling in between is not there; send the whole prompt", ([],)),
}


def without_refused(body: Any, table: Mapping[str, Refused]) -> Any:
    """The body less the fields that ask for nothing. Raises ApiError for one that asks."""
    if not isinstance(body, dict) or table.keys().isdisjoint(body):
        return body
    for name in table.keys() & body.keys():
        require_off(name, body[name], table[name])
    return {name: value for name, value in body.items() if name not in table}


def require_off(path: str, value: Any, refused: Refused) -> None:
    """Raise ApiError unless the value asks for nothing."""
    if value is None or any(_same(value, off) for off in refused.off):
        return
    raise ApiError(
        400,
        f"{path} is not supported with this value: {refused.instead}",
        code="unsupported_parameter",
        param=path,
    )


def _same(value: Any, off: Any) -> bool:
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)
