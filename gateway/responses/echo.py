"""The fields of the request that a response object repeats, with the values that were applied."""

from __future__ import annotations

from typing import Any

from gateway.models.config import Parameters
from gateway.responses.request import ResponsesRequest
from gateway.responses.tools import CustomTool, FunctionTool, NamespaceTool

Json = dict[str, Any]
_AS_SENT = (
    "instructions previous_response_id max_output_tokens max_tool_calls user safety_identifier"
    " prompt_cache_key".split()
)
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def echo_of(request: ResponsesRequest, defaults: Parameters) -> Json:
    """Return the fields of the request in a response object, with the model's defaults."""
    text = request.text
    reasoning = request.reasoning
    form = text.format if text is not None and text.format is not None else None
    return {
        **{name: getattr(request, name) for name in _AS_SENT},
        **{name: defaults.chosen(name, getattr(request, name)) for name in _SAMPLING},
        "tools": [_tool(tool) for tool in request.tools or ()],
        "tool_choice": _plain(request.tool_choice) or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {
            "format": _plain(form) or {"type": "text"},
            "verbosity": (text.verbosity if text is not None else None) or "medium",
        },
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
        "store": request.store is not False,
        "service_tier": "default",
        "metadata": request.metadata or {},
    }


def _tool(tool: FunctionTool | CustomTool | NamespaceTool) -> Json:
    if isinstance(tool, FunctionTool):
        return tool.model_dump() | {"strict": bool(tool.strict)}
    return tool.model_dump(exclude_none=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return value.model_dump(by_alias=True, exclude_none=True)
