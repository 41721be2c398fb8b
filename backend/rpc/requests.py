"""PredictOptions → GenerationRequest: the one place where a generation is validated.

What comes out can be served as it is; what cannot is refused with the field, its value and what
to send instead (contract 3.1). `backend.rpc.request_fields` says what becomes of the fields that
are not read here.
"""

from __future__ import annotations

import re
import secrets

from backend.engine.constraints.spec import ConstraintSpec, spec_of_grammar
from backend.engine.disk_cache.use import disk_use
from backend.engine.engine import ModelFacts
from backend.engine.errors import InvalidRequest
from backend.engine.request import ChatPrompt, Extras, GenerationRequest, RawPrompt
from backend.rpc import template_arguments
from backend.rpc.extras import of as read_extras
from backend.rpc.neutral import require_neutral
from backend.rpc.request_fields import REFUSED
from backend.rpc.sampling_fields import sampling
from common.messages import template_messages
from common.tools import Tool, ToolChoice, offered, parse_tool_choice, parse_tools
from wire import backend_pb2 as pb

MOST_STOPS = 64
LONGEST_STOP = 4096
MOST_MESSAGES = 10_000
LARGEST_JSON = 2 << 20
MOST_GUESSES = 64
MOST_ALTERNATIVES = 20  # OpenAI's bound of top_logprobs
_UNLIMITED = (0, -1, -2)  # what hosts send for "no limit"
_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def generation_request(options: pb.PredictOptions, facts: ModelFacts) -> GenerationRequest:
    """The validated request to the loaded model. Raises InvalidRequest with the field at fault."""
    require_neutral(options, REFUSED)
    extras = read_extras(options.Metadata, facts.defaults)
    max_tokens = _max_tokens(options.Tokens)
    return GenerationRequest(
        request_id=_request_id(options.CorrelationId),
        prompt=_prompt(options),
        sampling=sampling(options, extras, facts.vocabulary_size),
        max_tokens=max_tokens,
        stop=_stop_strings(list(options.StopPrompts)),
        min_tokens=_min_tokens(extras, max_tokens),
        ignore_eos=options.IgnoreEOS,
        logprobs=_logprobs(options),
        constraint=_constraint(options, extras),
        n_draft=_n_draft(options.NDraft),
        disk=disk_use(
            options.PromptCachePath,
            answer=options.PromptCacheAll,
            read_only=options.PromptCacheRO,
        ),
    )


def _request_id(label: str) -> str:
    """A name for logs, unique here; a client's label leads it if it is only a label."""
    unique = secrets.token_hex(6)
    return f"{label}.{unique}" if _LABEL.fullmatch(label) else unique


def _prompt(options: pb.PredictOptions) -> RawPrompt | ChatPrompt:
    """Messages through the template iff asked for and present, else Prompt (contract 3.3)."""
    if options.UseTokenizerTemplate and options.Messages:
        _require_bounded(options)
        try:
            messages = template_messages(options.Messages)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        tools, _ = _tools(options)
        return ChatPrompt(messages, tools or None, template_arguments.of(options.Metadata))
    if options.Prompt:
        return RawPrompt(options.Prompt)
    if options.Messages:
        raise InvalidRequest(
            "Messages are given without UseTokenizerTemplate, and Prompt is empty:"
            " set UseTokenizerTemplate, or send the text as Prompt"
        )
    raise InvalidRequest(
        "the prompt is empty: send text as Prompt, or Messages with UseTokenizerTemplate"
    )


def _require_bounded(options: pb.PredictOptions) -> None:
    """What is parsed here delays every other call, so there is a bound to it."""
    if len(options.Messages) > MOST_MESSAGES:
        raise InvalidRequest(
            f"Messages has {len(options.Messages)} entries: send at most {MOST_MESSAGES}"
        )
    parsed = len(options.Tools) + sum(len(message.tool_calls) for message in options.Messages)
    if parsed > LARGEST_JSON:
        raise InvalidRequest(
            f"Tools and tool_calls are {parsed} characters together: send at most {LARGEST_JSON}"
        )


def _max_tokens(value: int) -> int | None:
    if value in _UNLIMITED:
        return None
    if value < 0:
        raise InvalidRequest(f"Tokens is {value}: send a positive count, or 0 for no limit")
    return value


def _stop_strings(given: list[str]) -> tuple[str, ...]:
    """The stop strings, each once; empty ones are how hosts write "none" in a list."""
    stops = tuple(dict.fromkeys(stop for stop in given if stop))
    if len(stops) > MOST_STOPS:
        raise InvalidRequest(f"StopPrompts has {len(stops)} entries: send at most {MOST_STOPS}")
    for index, stop in enumerate(given):
        if len(stop.encode()) > LONGEST_STOP:
            raise InvalidRequest(
                f"StopPrompts[{index}] is {len(stop.encode())} bytes long:"
                f" send at most {LONGEST_STOP}"
            )
    return stops


def _tools(options: pb.PredictOptions) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model may see, and the choice among them (contract 3.6)."""
    try:
        choice = parse_tool_choice(options.ToolChoice)
        return offered(parse_tools(options.Tools), choice), choice
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _constraint(options: pb.PredictOptions, extras: Extras) -> ConstraintSpec | None:
    """What the answer must match: the grammar, else a call where one is demanded.

    Where the choice is free, a strict tool binds the calls that are made: of all the tools, since
    they share the call format. A host that makes a grammar of its tools sends both; the grammar is
    then the whole wish.
    """
    if options.Grammar.strip():
        return spec_of_grammar(options.Grammar, extras.grammar_type)
    if not (options.UseTokenizerTemplate and options.Messages):
        return None
    tools, choice = _tools(options)
    if choice.mode == "auto" and any(tool["function"].get("strict") is True for tool in tools):
        parallel = extras.parallel_tool_calls
        return ConstraintSpec("calls", tools=tools, parallel=parallel, optional=True)
    if choice.mode != "required":
        return None
    if choice.name:
        named = tuple(tool for tool in tools if tool["function"]["name"] == choice.name)
        return ConstraintSpec("calls", tools=named, parallel=False)
    return ConstraintSpec("calls", tools=tools, parallel=extras.parallel_tool_calls)


def _min_tokens(extras: Extras, most: int | None) -> int:
    if most is not None and extras.min_tokens > most:
        raise InvalidRequest(
            f"Metadata mlx.min_tokens is {extras.min_tokens}, but Tokens is {most}: send less"
        )
    return extras.min_tokens


def _n_draft(value: int) -> int:
    if value < 0:
        raise InvalidRequest(f"NDraft is {value}: send a count, or 0 for the model's own")
    return min(value, MOST_GUESSES)


def _logprobs(options: pb.PredictOptions) -> int | None:
    """How many alternatives to tell per token; None where nothing is asked for."""
    for name in ("Logprobs", "TopLogprobs"):
        if (value := getattr(options, name)) < 0:
            raise InvalidRequest(f"{name} is {value}: send a count, or 0 for none")
    if options.TopLogprobs > MOST_ALTERNATIVES:
        raise InvalidRequest(
            f"TopLogprobs is {options.TopLogprobs}: send at most {MOST_ALTERNATIVES}"
        )
    if not options.Logprobs and not options.TopLogprobs:
        return None
    return options.TopLogprobs
