"""Converts PredictOptions to a GenerationRequest; every generation is validated here.

The result can be served as it is. A request that cannot be served is refused with the field, its
value and what to send instead. docs/fields.md lists the fields that are not read here.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import replace
from typing import Any

from backend.engine.constraints.spec import ConstraintSpec, spec_of_grammar
from backend.engine.disk_cache.use import DiskUse, absolute_folder
from backend.engine.errors import InvalidRequest
from backend.engine.request import (
    MOST_DRAFT_TOKENS,
    WHOLE,
    Attachments,
    ChatPrompt,
    Extras,
    GenerationRequest,
    Prompt,
    Sampling,
)
from backend.engine.served_model import ServedModel
from backend.rpc.checks import json_value, require_alone, require_least, require_most
from backend.rpc.fields import PREDICT_OPTIONS, require_neutral
from backend.rpc.prompt_fields import prompt_of, require_in_vocabulary, tool_choice
from backend.rpc.request_metadata import PREFIX, extras_of
from common.field_names import named
from common.wording import did_you_mean, shown
from wire import backend_pb2 as pb

MOST_STOPS = 64
LONGEST_STOP = 4096
MOST_ALTERNATIVES = 20  # OpenAI's limit for top_logprobs
# Gemini's token budgets by effort, https://ai.google.dev/gemini-api/docs/openai#thinking
EFFORT_BUDGETS = {
    "none": 0,
    "minimal": 1024,
    "low": 1024,
    "medium": 8192,
    "high": 24576,
    "xhigh": -1,
    "max": -1,
}
_BUDGET = f"{PREFIX}thinking_budget"
_LEAST = f"{PREFIX}min_tokens"
_UNLIMITED = (0, -1, -2)  # values that hosts send for "no limit"
_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,64}")
MAX_TEMPERATURE = 100.0
LARGEST_BIAS = 1e6
MOST_BIASES = 10_000
LARGEST_PENALTY = 100.0
_DEFAULT_WINDOW = 64  # llama.cpp's repeat_last_n
_GREEDY_BELOW = 1e-5  # logits divided by a smaller temperature overflow float32


def generation_request(options: pb.PredictOptions, served: ServedModel) -> GenerationRequest:
    """Return the validated request. Raises InvalidRequest with the field at fault."""
    require_neutral(PREDICT_OPTIONS, options)
    extras = extras_of(options.Metadata, served.defaults)
    prompt = prompt_of(options, extras, served.vocabulary_size)
    constraint = _constraint(options, prompt, extras)
    if constraint is not None and extras.continue_final_message:
        raise _cannot_constrain_continuation(constraint)
    budget = _thinking_budget(options, prompt, extras, served)
    if budget is not None and isinstance(prompt, ChatPrompt):
        prompt = _with_budget_variables(prompt, budget, served)
    max_tokens = None if options.Tokens in _UNLIMITED else options.Tokens
    if max_tokens is not None:
        require_least("Tokens", max_tokens, 0, "a positive count, or 0 for no limit")
    require_least("NDraft", options.NDraft, -1, "a count, 0 for the model's own, or -1 for none")
    n_draft = min(max(options.NDraft, 0), MOST_DRAFT_TOKENS)
    label, unique = options.CorrelationId, secrets.token_hex(6)
    require_in_vocabulary("stop_token_ids", extras.stop_token_ids, served.vocabulary_size)
    return GenerationRequest(
        # Unique in the log; it begins with the client's label if that is plain text.
        request_id=f"{label}.{unique}" if _LABEL.fullmatch(label) else unique,
        prompt=prompt,
        sampling=sampling(options, extras, served.vocabulary_size),
        max_tokens=max_tokens,
        stop=_stop_strings(list(options.StopPrompts)),
        min_tokens=_min_tokens(options, extras, max_tokens or served.default_max_tokens),
        ignore_eos=options.IgnoreEOS,
        stop_tokens=frozenset(extras.stop_token_ids),
        logprobs=_logprobs(options),
        stream_logprobs=extras.stream_logprobs,
        stream_progress=extras.stream_progress,
        prompt_logprobs=options.TopLogprobs if extras.prompt_logprobs else None,
        prompt_only=extras.prompt_only,
        count_only=extras.count_only,
        constraint=constraint,
        thinking_budget=budget,
        n_draft=n_draft if options.NDraft else None,
        disk=DiskUse(
            absolute_folder("PromptCachePath", options.PromptCachePath),
            answer=options.PromptCacheAll,
            read_only=options.PromptCacheRO,
        ),
        adapter=_adapter(options, extras, served),
        attachments=_attachments(options, extras, served),
    )


def _adapter(options: pb.PredictOptions, extras: Extras, served: ServedModel) -> str:
    """Return the adapter that the request chooses. Raises InvalidRequest for an unknown one."""
    name, field = extras.adapter, named("Metadata mlx.adapter")
    if name and name not in served.adapters:
        listed = f"use one of {', '.join(served.adapters)}"
        hint = did_you_mean(name, served.adapters) or (
            f": {listed}"
            if served.adapters
            else ": the model has none, because its option adapters is empty"
        )
        raise InvalidRequest(f"{field} is {shown(name)}, but the model has no such adapter{hint}")
    if name:
        why = "send one of them, because KV that an adapter computed is not stored in files"
        require_alone("Metadata mlx.adapter", {"PromptCachePath": options.PromptCachePath}, why)
    return name


def _cannot_constrain_continuation(constraint: ConstraintSpec) -> InvalidRequest:
    begun = "an answer that the client has started: send none, or"
    if constraint.kind != "calls":
        return InvalidRequest(f"the grammar cannot constrain {begun} leave out {named('Grammar')}")
    if constraint.optional:
        return InvalidRequest(
            f"strict tools cannot be enforced in {begun} offer tools that are not strict", "Tools"
        )
    return InvalidRequest(f"tool calls cannot be enforced in {begun} require no call", "ToolChoice")


def _attachments(
    options: pb.PredictOptions, extras: Extras, served: ServedModel
) -> Attachments | None:
    """Return the media of the prompt, still encoded; a prompt thread decodes them."""
    given = Attachments(
        tuple(options.Images),
        tuple(options.Audios),
        tuple(options.Videos),
        extras.image_messages,
        extras.audio_messages,
        extras.video_messages,
    )
    if given == Attachments():
        return None
    kinds = ("Images", "Videos", "Audios")
    sent = [named(name) for name in kinds if getattr(options, name)]
    positions = [named(f"Metadata mlx.{kind}_messages") for kind in ("image", "video", "audio")]
    if not served.media:
        raise InvalidRequest(
            f"{' and '.join(sent or positions)} cannot be used, because the loaded model"
            f" {shown(served.public_name)} accepts only text: send none, or load a vision-language"
            " model"
        )
    others = {
        "Metadata mlx.prompt_token_ids": extras.prompt_token_ids is not None,
        "Metadata mlx.infill": extras.infill is not None,
        "Metadata mlx.prompt_logprobs": extras.prompt_logprobs,
    }
    for key in (key for key, is_given in others.items() if is_given):
        raise InvalidRequest(f"{named(key)} and media are both given: send only one of them")
    return given


def _stop_strings(given: list[str]) -> tuple[str, ...]:
    """Return the distinct stop strings; hosts send an empty one for "none"."""
    stops = tuple(dict.fromkeys(stop for stop in given if stop))
    require_most("StopPrompts", stops, MOST_STOPS)
    for index, stop in enumerate(given):
        require_most(f"StopPrompts[{index}]", stop.encode(), LONGEST_STOP, "bytes")
    return stops


def _constraint(
    options: pb.PredictOptions, prompt: Prompt, extras: Extras
) -> ConstraintSpec | None:
    """Return the constraint on the answer: the grammar, or the tool calls if they are enforced.

    With tool_choice auto, one strict tool constrains the calls of all tools, because they share the
    call format. If a tool is strict, LocalAI sends a GBNF for its own call format; this grammar is
    ignored, because the calls are enforced in the model's format. Any other grammar that is sent
    with tools excludes calls, unless `mlx.grammar_or_calls` is set.
    """
    answer = None
    tools = prompt.tools or () if isinstance(prompt, ChatPrompt) else ()
    strict = any(tool["function"].get("strict") is True for tool in tools)
    if options.Grammar.strip():
        answer = spec_of_grammar(options.Grammar, extras.grammar_type)
        if not extras.grammar_or_calls:
            if not (strict and answer.kind == "gbnf"):
                return answer
            answer = None
    if not isinstance(prompt, ChatPrompt):
        return answer
    choice = tool_choice(options)
    parallel = extras.parallel_tool_calls
    if choice.mode == "required":
        if choice.name:
            named = tuple(tool for tool in tools if tool["function"]["name"] == choice.name)
            return ConstraintSpec("calls", tools=named, parallel=False)
        return ConstraintSpec("calls", tools=tools, parallel=parallel)
    if strict or (tools and answer is not None):
        return ConstraintSpec("calls", tools=tools, parallel=parallel, optional=True, answer=answer)
    return answer


def _thinking_budget(
    options: pb.PredictOptions, prompt: Prompt, extras: Extras, served: ServedModel
) -> int | None:
    """Return the maximum number of reasoning tokens; None for no limit.

    That is the request's budget, else the budget of its effort, else the model's default. An effort
    is not turned into a budget if the template has a variable for it.
    """
    in_request = _BUDGET in options.Metadata
    if not isinstance(prompt, ChatPrompt):
        if in_request and extras.thinking_budget >= 0:
            raise InvalidRequest(
                f"{named(f'Metadata {_BUDGET}')} is {extras.thinking_budget}, but reasoning is"
                " recognised only in an answer to Messages: send Messages, or leave it out"
            )
        return None
    given = extras.thinking_budget
    if not in_request:
        arguments = prompt.template_arguments
        variable, effort = arguments.get("thinking_budget"), arguments.get("reasoning_effort")
        if type(variable) is int:
            given = variable
        elif isinstance(effort, str) and "reasoning_effort" not in served.template_words:
            given = EFFORT_BUDGETS.get(effort, given)
    return given if given >= 0 else None


def _with_budget_variables(prompt: ChatPrompt, budget: int, served: ServedModel) -> ChatPrompt:
    """Return the prompt with the template variables that express the budget.

    With a budget of 0, thinking is disabled: templates then open no reasoning or close it
    immediately.
    """
    arguments = dict(prompt.template_arguments)
    if "thinking_budget" in served.template_words:
        arguments.setdefault("thinking_budget", budget)
    if budget == 0:
        arguments.setdefault("enable_thinking", False)
    return replace(prompt, template_arguments=arguments)


def _min_tokens(options: pb.PredictOptions, extras: Extras, most: int | None) -> int:
    """Return the minimum length of the answer.

    A minimum from the model's options is lowered to a smaller limit; one from the request is
    refused.

    most: the maximum length of the answer; None or 0 for none.
    """
    least = extras.min_tokens
    if not most or least <= most:
        return least
    if _LEAST not in options.Metadata:
        return most
    limit = named("Tokens") if options.Tokens > 0 else "the model's max_tokens"
    raise InvalidRequest(
        f"{named(f'Metadata {_LEAST}')} is {least}, but {limit} is {most}: send less, or more"
        f" {named('Tokens')}"
    )


def _logprobs(options: pb.PredictOptions) -> int | None:
    """Return the number of alternatives per token; None for no log-probabilities."""
    for name in ("Logprobs", "TopLogprobs"):
        require_least(name, getattr(options, name), 0, "a count, or 0 for none")
    if options.TopLogprobs > MOST_ALTERNATIVES:
        raise InvalidRequest(
            f"{named('TopLogprobs')} is {options.TopLogprobs}: send at most {MOST_ALTERNATIVES}"
        )
    if not options.Logprobs and not options.TopLogprobs:
        return None
    return options.TopLogprobs


def sampling(options: pb.PredictOptions, extras: Extras, vocabulary_size: int) -> Sampling:
    """Return the sampling of a request. Raises InvalidRequest for a value out of range."""
    require_least("TopK", options.TopK, -1, "a positive count, or 0 or -1 to turn it off")
    looks_back = f"how many tokens {named('Penalty')} looks back, 0 for {_DEFAULT_WINDOW}"
    require_least("Repeat", options.Repeat, -1, f"{looks_back}, or -1 for all of them")
    temperature = _within("Temperature", options, 0.0, MAX_TEMPERATURE)
    return Sampling(
        logit_bias=_logit_bias(options.LogitBias, vocabulary_size),
        repetition=_within("Penalty", options, 1 / LARGEST_PENALTY, LARGEST_PENALTY)
        if options.Penalty
        else 1.0,
        window=WHOLE if options.Repeat == -1 else options.Repeat or _DEFAULT_WINDOW,
        frequency=_within("FrequencyPenalty", options, -LARGEST_PENALTY, LARGEST_PENALTY),
        presence=_within("PresencePenalty", options, -LARGEST_PENALTY, LARGEST_PENALTY),
        frequency_window=extras.frequency_window,
        presence_window=extras.presence_window,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(options.TopK, 0),
        typical_p=_share("TypicalP", options),
        top_p=_share("TopP", options),
        min_p=_within("MinP", options, 0.0, 1.0),
        xtc_probability=extras.xtc_probability,
        xtc_threshold=extras.xtc_threshold,
        # A new one for -1; a negative number is read as unsigned.
        seed=secrets.randbits(63) if options.Seed == -1 else options.Seed & 0xFFFF_FFFF,
    )


def _within(name: str, options: pb.PredictOptions, low: float, high: float) -> float:
    value: float = getattr(options, name)
    if math.isfinite(value) and low <= value <= high:
        return value
    limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"not below {low:g}"
    raise InvalidRequest(f"{named(name)} is {value:g}: send a finite number {limits}")


def _share(name: str, options: pb.PredictOptions) -> float:
    """Return a probability mass: 0 means unset, and 1 or more keeps all tokens."""
    value = _within(name, options, 0.0, math.inf)
    return value if 0 < value < 1 else 1.0


def _logit_bias(text: str, vocabulary_size: int) -> tuple[tuple[int, float], ...]:
    """Parse a JSON object of token id → value added to its logit."""
    given = json_value(dict, "LogitBias", text, 'a JSON object such as {"42": -100}')
    require_most("LogitBias", given, MOST_BIASES, "tokens")
    return tuple((_token(key, vocabulary_size), _bias(key, value)) for key, value in given.items())


def _token(key: str, vocabulary_size: int) -> int:
    text = key.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise InvalidRequest(f"{named('LogitBias')} has the key {shown(key)}: send token ids")
    if int(text) >= vocabulary_size:
        raise InvalidRequest(
            f"{named('LogitBias')} names the token {text}, but the model's vocabulary ends at"
            f" {vocabulary_size - 1}"
        )
    return int(text)


def _bias(key: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and abs(value) <= LARGEST_BIAS:
        return float(value)
    raise InvalidRequest(
        f"{named('LogitBias')}[{shown(key)}] is {shown(value)}: send a number from"
        f" {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
    )
