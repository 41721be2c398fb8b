"""The body of `/chat/completions`: every field, with its limits."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gateway.openai import refused
from gateway.openai.base import Strict, TextRequest
from gateway.openai.format_fields import FormatFields
from gateway.openai.messages import ChatMessage
from gateway.openai.sampling_fields import MOST_ALTERNATIVES, Options, SamplingFields
from gateway.openai.thinking_fields import ThinkingFields
from gateway.openai.tools import AnyTool, FunctionCallChoice, FunctionDefinition, ToolChoice

MOST_MESSAGES = 10_000
MOST_TOOLS = 1024


class RoleMapping(Strict):
    """mlx_lm.server's texts around the messages, for models without a chat template."""

    system: str = ""
    user: str = ""
    assistant: str = ""
    tool: str = ""
    stop: str = Field("", description="What ends every message.")


class ChatCompletionRequest(SamplingFields, FormatFields, ThinkingFields, TextRequest):
    """OpenAI's chat request, with the fields of mlx_lm.server, MLC-LLM, llama.cpp and vLLM."""

    refused = refused.CHAT

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="The newer name of max_tokens."
    )
    tools: list[AnyTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = Field(
        None, description="`required` and a named function are enforced by a grammar."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: an answer ends after its first call."
    )
    functions: list[FunctionDefinition] | None = Field(
        None, max_length=MOST_TOOLS, description="Legacy form of tools."
    )
    function_call: FunctionCallChoice | None = Field(
        None, description="Legacy form of tool_choice."
    )
    logprobs: bool | Annotated[int, Field(ge=-1, le=MOST_ALTERNATIVES)] | None = Field(
        None,
        description="Log-probabilities of the tokens; a number above 0 asks for so many"
        " alternatives as well, as in mlx_lm.server and llama.cpp.",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MOST_ALTERNATIVES, description="Alternatives per token; needs logprobs."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template; they override those of the model's file."
    )
    continue_final_message: bool | None = Field(
        None, description="The last message is an assistant's, and the answer continues its text."
    )
    add_generation_prompt: bool | None = Field(
        None, description="vLLM: false with continue_final_message, else true."
    )
    role_mapping: RoleMapping | None = Field(
        None, description="Texts to build the prompt with, instead of the model's chat template."
    )
    options: Options | None = Field(
        None, description="Ollama: sampling fields; fields of the request itself take precedence."
    )

    @model_validator(mode="after")
    def _spread(self) -> Self:
        """Expand nested objects into fields of the request, where it does not set them itself."""
        if self.options is not None:
            given = self.options.model_dump(exclude_none=True)
            if self.max_tokens is not None or self.max_completion_tokens is not None:
                given.pop("n_predict", None)
            self.fill(given)
        self.fill(self.thinking_values())
        if self.messages[-1].prefix:
            self.fill({"continue_final_message": True})
        return self
