"""The body of `/chat/completions`: every field, with its limits."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gateway import fields
from gateway.described import about
from gateway.fields import Strict, TextRequest
from gateway.openai.answer_format import FormatFields
from gateway.openai.messages import ChatMessage
from gateway.openai.sampling import MOST_ALTERNATIVES, Options, SamplingFields
from gateway.openai.thinking import ThinkingFields
from gateway.openai.tools import (
    MOST_TOOLS,
    AnyTool,
    FunctionCallChoice,
    FunctionDefinition,
    ToolChoice,
)
from gateway.tagged import MOST_ENTRIES


class RoleMapping(Strict):
    """The strings that mlx_lm.server puts around messages, for models without a chat template."""

    system: str = ""
    user: str = ""
    assistant: str = ""
    tool: str = ""
    stop: str = about("The text that ends every message.", "")


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

    @model_validator(mode="after")
    def _spread(self) -> Self:
        """Expand nested objects into fields of the request, where it does not set them itself."""
        if self.options is not None:
            given = {name: value for name, value in self.options if value is not None}
            limits = (self.max_tokens, self.max_completion_tokens)
            if not given.get("n_predict") or any(limit is not None for limit in limits):
                given.pop("n_predict", None)
            self.fill(given)
        self.fill(self.thinking_values())
        if self.messages[-1].prefix:
            self.fill({"continue_final_message": True})
        return self
