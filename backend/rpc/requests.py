"""PredictOptions → GenerationRequest: the one place where a generation is validated.

What comes out can be served as it is; what cannot is refused with the field, its value and what
to send instead (contract 3.1). `backend.rpc.request_fields` says what becomes of the fields that
are not read here.
"""

from __future__ import annotations

import math
import re
import secrets

from backend.engine.errors import InvalidRequest
from backend.engine.request import ChatPrompt, GenerationRequest, RawPrompt, Sampling
from backend.rpc import template_arguments
from backend.rpc.neutral import require_neutral
from backend.rpc.request_fields import REFUSED
from common.messages import template_messages
from common.tools import Tool, offered, parse_tool_choice, parse_tools
from wire import backend_pb2 as pb

MOST_STOPS = 64
LONGEST_STOP = 4096
MOST_MESSAGES = 10_000
LARGEST_JSON = 2 << 20
HOTTEST = 100.0
_GREEDY_BELOW = 1e-5  # logits divided by less leave float32
_UNLIMITED = (0, -1, -2)  # what hosts send for "no limit"
_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def generation_request(options: pb.PredictOptions) -> GenerationRequest:
    """The validated request. Raises InvalidRequest with the field at fault."""
    require_neutral(options, REFUSED)
    return GenerationRequest(
        request_id=_request_id(options.CorrelationId),
        prompt=_prompt(options),
        sampling=_sampling(options),
        max_tokens=_max_tokens(options.Tokens),
        stop=_stop_strings(list(options.StopPrompts)),
        ignore_eos=options.IgnoreEOS,
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
        return ChatPrompt(messages, _tools(options), template_arguments.of(options.Metadata))
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


def _sampling(options: pb.PredictOptions) -> Sampling:
    return Sampling(
        temperature=_temperature(options.Temperature),
        top_p=_top_p(options.TopP),
        top_k=_top_k(options.TopK),
        min_p=_within("MinP", options.MinP, 0.0, 1.0),
        seed=_seed(options.Seed),
    )


def _temperature(value: float) -> float:
    value = _within("Temperature", value, 0.0, HOTTEST)
    return value if value >= _GREEDY_BELOW else 0.0


def _top_p(value: float) -> float:
    value = _within("TopP", value, 0.0, math.inf)
    return value if 0 < value < 1 else 1.0


def _top_k(value: int) -> int:
    if value < -1:
        raise InvalidRequest(f"TopK is {value}: send a positive count, or 0 or -1 to turn it off")
    return max(value, 0)


def _within(name: str, value: float, low: float, high: float) -> float:
    if math.isfinite(value) and low <= value <= high:
        return value
    limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"not below {low:g}"
    raise InvalidRequest(f"{name} is {value:g}: send a finite number {limits}")


def _seed(value: int) -> int:
    """-1 asks for a fresh one; any other number is a seed, the negative ones as unsigned."""
    return secrets.randbits(63) if value == -1 else value & 0xFFFF_FFFF


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


def _tools(options: pb.PredictOptions) -> tuple[Tool, ...] | None:
    """The tools that the model may see; None where it may see none (contract 3.6)."""
    try:
        choice = parse_tool_choice(options.ToolChoice)
        tools = offered(parse_tools(options.Tools), choice)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if choice.mode == "required":
        raise InvalidRequest(
            f"ToolChoice is {options.ToolChoice.strip()[:80]}, but this version cannot force a"
            " call: send auto, and say in the messages that a tool is to be used"
        )
    return tools or None
