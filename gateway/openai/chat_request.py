"""The body of `/chat/completions`, and its translation to PredictOptions, one per choice.

Other APIs (Anthropic's Messages, OpenAI's Responses) translate their request into a chat request
first, so that a field means the same wherever it is sent.
"""

from __future__ import annotations

import copy
import json
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from common.field_names import named
from gateway import fields
from gateway.context import Gateway
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import TextRequest
from gateway.models.checkpoint import Checkpoints
from gateway.models.config import ModelConfig
from gateway.openai.answer_format import FormatFields, constraint_of, write_constraint
from gateway.openai.messages import ChatMessage, RoleMapping, has_media, without_media
from gateway.openai.messages_to_wire import prompt_of, wire_messages
from gateway.openai.sampling import (
    MOST_ALTERNATIVES,
    NAMES,
    Options,
    SamplingFields,
    agreed,
    most_tokens,
    require_few,
    seed_of,
    write_sampling,
)
from gateway.openai.thinking import ThinkingFields, write_template_arguments
from gateway.openai.tools import (
    MOST_TOOLS,
    AnyTool,
    FunctionCallChoice,
    FunctionDefinition,
    ToolChoice,
    offer_of,
    write_tools,
)
from gateway.tagged import MOST_ENTRIES
from gateway.threads import offload
from wire import backend_pb2 as pb


class ChatCompletionRequest(SamplingFields, FormatFields, ThinkingFields, TextRequest):
    """OpenAI's chat request, with the fields of mlx_lm.server, MLC-LLM, llama.cpp and vLLM."""

    others = fields.CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_ENTRIES)
    max_completion_tokens: int | None = about("The newer name of max_tokens.", ge=-1, le=2**31 - 1)
    tools: list[AnyTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = about("`required` and a name are enforced by a grammar.")
    parallel_tool_calls: bool | None = about("false: an answer ends after its first call.")
    functions: list[FunctionDefinition] | None = about("Legacy tools.", max_length=MOST_TOOLS)
    function_call: FunctionCallChoice | None = about("Legacy form of tool_choice.")
    logprobs: bool | Annotated[int, Field(ge=-1, le=MOST_ALTERNATIVES)] | None = about(
        "Log-probabilities of the tokens; a number above 0 asks for so many"
        " alternatives as well, as in mlx_lm.server and llama.cpp."
    )
    top_logprobs: int | None = about("Needs logprobs.", ge=0, le=MOST_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] | None = about("Arguments that override the model file's.")
    continue_final_message: bool | None = about("The answer continues the last message.")
    add_generation_prompt: bool | None = about("vLLM: send false with continue_final_message.")
    role_mapping: RoleMapping | None = about("Texts to use instead of the chat template.")
    options: Options | None = about("Ollama's object; the request's own fields win.")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are requested; a number of 0 or below means no."""
        return self.logprobs is True or (self.logprobs or 0) > 0 or (self.n_probs or 0) > 0

    @model_validator(mode="after")
    def _spread(self) -> Self:
        """Copy values of nested objects to those fields of the request that are not set."""
        if self.options is not None:
            given = {name: value for name, value in self.options if value is not None}
            if given.get("n_predict") == 0:  # an unset limit
                del given["n_predict"]
            self.fill(given)
        self.fill(self.thinking_values())
        if self.messages[-1].prefix:
            self.fill({"continue_final_message": True})
        return self


async def options_of(
    request: ChatCompletionRequest, config: ModelConfig, gateway: Gateway
) -> list[pb.PredictOptions]:
    """Return the requests to the backend, one per choice. A lease adds their ModelIdentity later.

    An invalid request is thus refused before a model is loaded, with its own HTTP status.
    """
    first = pb.PredictOptions()
    checkpoints = gateway.supervisor.checkpoints
    await offload(_write_fields, first, request, config, checkpoints)
    await _write_prompt(first, request, gateway)
    return await offload(_choices, first, request, config)


def _choices(
    first: pb.PredictOptions, request: ChatCompletionRequest, config: ModelConfig
) -> list[pb.PredictOptions]:
    require_few(first, request.n or 1)
    wanted = [first, *(copy.deepcopy(first) for _ in range(1, request.n or 1))]
    for choice, options in enumerate(wanted):
        options.Seed = seed_of(request, config, choice)
    return wanted


def _write_fields(
    options: pb.PredictOptions,
    request: ChatCompletionRequest,
    config: ModelConfig,
    checkpoints: Checkpoints,
) -> None:
    """Write all but the prompt, and adapt the messages to the model."""
    write_sampling(options, request, config)
    options.Tokens = most_tokens(
        config.parameters.max_tokens or 0,
        # Programs send 0 for an unset limit.
        *((name, getattr(request, name) or None) for name in NAMES["Tokens"]),
    )
    if request.n_predict == 0 and not (request.max_tokens or request.max_completion_tokens):
        options.Metadata["mlx.prompt_only"] = "true"
    _write_logprobs(options, request)
    offer = offer_of(request)
    constraint = constraint_of(request)
    write_tools(options, offer, request)
    write_constraint(options, constraint)
    # The format applies to content, not to calls.
    if constraint is not None and offer.tools and offer.mode != "none":
        options.Metadata["mlx.grammar_or_calls"] = "true"
    write_template_arguments(options, request, config)
    shows = any(has_media(message.content) for message in request.messages)
    if shows and checkpoints.is_text_only(config):
        request.messages = without_media(request.messages, config.name)


def _write_logprobs(options: pb.PredictOptions, request: ChatCompletionRequest) -> None:
    number = 0 if isinstance(request.logprobs, bool) else request.logprobs or 0
    alternatives = agreed(
        ("logprobs", number if number > 0 else None),
        ("top_logprobs", request.top_logprobs),
        ("n_probs", request.n_probs or None),
    )
    requested = request.wants_logprobs
    if alternatives and not requested:
        raise bad_field(f"{named('top_logprobs')} needs logprobs: send logprobs true")
    if requested and request.include_reasoning is False:
        # The log-probabilities of a token are sent with the next text, of whatever kind.
        raise bad_field(
            f"{named('include_reasoning')} is false and log-probabilities are requested: those of"
            " the reasoning cannot be separated from those of the answer, so leave out one of the"
            " two"
        )
    if requested:
        options.Logprobs = 1
        options.TopLogprobs = alternatives or 0
        options.Metadata["mlx.stream_logprobs"] = "true"


async def _write_prompt(
    options: pb.PredictOptions, request: ChatCompletionRequest, gateway: Gateway
) -> None:
    _require_one_beginning(request)
    if request.role_mapping is not None:
        found = await wire_messages(request.messages, gateway.settings, pb.PredictOptions())
        options.Prompt = prompt_of(request.role_mapping, found, options)
        return
    found = await wire_messages(request.messages, gateway.settings, options)
    options.UseTokenizerTemplate = True
    if request.continue_final_message:
        options.Metadata["mlx.continue_final_message"] = "true"
    for kind, items in found.media.items():
        getattr(options, f"{kind.title()}s").extend(content for _, content in items)
        if items:
            options.Metadata[f"mlx.{kind}_messages"] = json.dumps([place for place, _ in items])


def _require_one_beginning(request: ChatCompletionRequest) -> None:
    """Require that the answer either begins a message or continues the last one, and not both."""
    continues = bool(request.continue_final_message)
    if request.add_generation_prompt == continues and request.add_generation_prompt is not None:
        raise bad_field(
            f"{named('add_generation_prompt')} is {json.dumps(continues)} and"
            f" continue_final_message is {json.dumps(continues)}: an answer either begins a"
            " message or continues one"
        )
    if continues and request.role_mapping is not None:
        raise bad_field(
            f"{named('continue_final_message')} needs the model's chat template: leave out"
            " role_mapping"
        )
    if continues and request.messages[-1].role != "assistant":
        raise bad_field(
            f"messages[{len(request.messages) - 1}] is not an assistant message:"
            f" {named('continue_final_message')} needs one"
        )
