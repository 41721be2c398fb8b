"""Reads the fields of PredictOptions that form the prompt: text, tokens, or messages with tools."""

from __future__ import annotations

from dataclasses import replace

from backend.engine.errors import InvalidRequest
from backend.engine.request import ChatPrompt, Extras, Prompt, RawPrompt, TokenPrompt
from backend.rpc.checks import require_alone, require_most
from backend.rpc.request_metadata import template_arguments
from backend.rpc.template_messages import template_messages
from backend.rpc.tools import (
    ToolChoice,
    corrected_choice,
    offered_tools,
    parse_tool_choice,
    parse_tools,
    sorted_tools,
)
from common.field_names import named
from wire import backend_pb2 as pb

MOST_MESSAGES = 10_000
LARGEST_JSON = 2 << 20
_TOKENS = "Metadata mlx.prompt_token_ids"


def prompt_of(options: pb.PredictOptions, extras: Extras, vocabulary_size: int) -> Prompt:
    """Return the Messages if the template is requested and there are any, else Prompt.

    This is llama.cpp's rule. Raises InvalidRequest with the field at fault.
    """
    chats = options.UseTokenizerTemplate and len(options.Messages) > 0
    if extras.continue_final_message and not chats:
        raise InvalidRequest(
            f"{named('Metadata mlx.continue_final_message')} is true, but there are no Messages to"
            " continue: send them with UseTokenizerTemplate, or leave it out"
        )
    if extras.infill is not None:
        others = {"Messages": chats, _TOKENS: extras.prompt_token_ids is not None}
        require_alone("Metadata mlx.infill", others, "send the text before the gap as Prompt")
        return replace(extras.infill, prefix=options.Prompt)
    if extras.prompt_token_ids is not None:
        require_alone(_TOKENS, {"Prompt": options.Prompt, "Messages": chats})
        require_in_vocabulary("prompt_token_ids", extras.prompt_token_ids, vocabulary_size)
        return TokenPrompt(extras.prompt_token_ids)
    if chats and extras.prompt_logprobs:
        raise InvalidRequest(
            f"{named('Metadata mlx.prompt_logprobs')} is true, but Messages are given: only a raw"
            " prompt has log-probabilities; send Prompt, or leave it out"
        )
    if chats:
        _require_bounded(options)
        messages = template_messages(options.Messages)
        if extras.continue_final_message:
            _require_begun(options)
        arguments = template_arguments(options.Metadata)
        tools = sorted_tools(offered_tools(parse_tools(options.Tools), tool_choice(options)))
        return ChatPrompt(messages, tools or None, arguments, extras.continue_final_message)
    if text := options.Prompt:  # every access copies the text
        return RawPrompt(text)
    if options.Messages:
        raise InvalidRequest(
            f"{named('Messages')} are given without UseTokenizerTemplate, and Prompt is empty:"
            " set UseTokenizerTemplate, or send the text as Prompt"
        )
    raise InvalidRequest(
        "the prompt is empty: send text as Prompt, or Messages with UseTokenizerTemplate"
    )


def _require_begun(options: pb.PredictOptions) -> None:
    last = options.Messages[-1]
    field = f"Messages[{len(options.Messages) - 1}]"
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise InvalidRequest(
            f"{named(field)} cannot be continued: Metadata mlx.continue_final_message needs an"
            " assistant's text there, without tool calls"
        )


def _require_bounded(options: pb.PredictOptions) -> None:
    """Limit what is parsed here, because parsing delays every other call."""
    require_most("Messages", options.Messages, MOST_MESSAGES)
    parsed = len(options.Tools) + sum(len(message.tool_calls) for message in options.Messages)
    if parsed > LARGEST_JSON:
        raise InvalidRequest(
            f"{named('Tools')} and tool_calls are {parsed} characters together: send at most"
            f" {LARGEST_JSON}"
        )


def require_in_vocabulary(key: str, ids: tuple[int, ...], vocabulary_size: int) -> None:
    """Raise InvalidRequest if a `mlx.` key lists a token that the model does not have."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocabulary_size:
            raise InvalidRequest(
                f"{named(f'Metadata mlx.{key}[{index}]')} is {token}, but the vocabulary ends at"
                f" {vocabulary_size - 1}"
            )


def tool_choice(options: pb.PredictOptions) -> ToolChoice:
    """Return whether the model may, must or must not call a tool. Raises InvalidRequest."""
    choice = parse_tool_choice(options.ToolChoice)
    return corrected_choice(choice, parse_tools(options.Tools)) if choice.name else choice
