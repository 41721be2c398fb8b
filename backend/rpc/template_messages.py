"""Converts protocol messages to the dicts that chat templates read, without losing anything.

Templates of different families read different keys, so every field of a message is passed on, under
its name in OpenAI's API. Tool calls arrive as JSON text inside JSON text, and are decoded for the
templates. A call that cannot be decoded is an error, because the conversation would be incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.rpc.checks import json_value
from common.field_names import named
from wire import backend_pb2 as pb

# Claude Code begins its system prompt with this line for Anthropic's own servers. It changes with
# every request, so no prompt would start with the same tokens as the previous one.
_BILLING_LABEL = "x-anthropic-billing-header:"
_BILLING = re.compile(rf"^{_BILLING_LABEL}[^\n]*\n*", re.MULTILINE)


def template_messages(messages: Iterable[pb.Message]) -> tuple[dict[str, Any], ...]:
    """Return one dict per message. Raises InvalidRequest with the index of a wrong message."""
    names: dict[str, str] = {}  # of the functions called so far, by the id of the call
    entries = []
    for index, message in enumerate(messages):
        entry = _template_message(index, message)
        if entry["role"] in ("tool", "function"):
            _complete(entry, names)
        entries.append(entry)
        names.update(_names_by_id(entry.get("tool_calls", ())))
    return tuple(entries)


def _complete(result: dict[str, Any], names: Mapping[str, str]) -> None:
    """Add the id of the call that a result answers and the function's name, if one is missing.

    Some templates read one of them, some the other. Clients send the id. LocalAI passes it on, or,
    in its Responses API, sends the id as the name.
    """
    answered = result.get("tool_call_id") or result.get("name", "")
    if answered in names:
        result["tool_call_id"] = answered
        if result.get("name", answered) == answered:
            result["name"] = names[answered]


def _names_by_id(calls: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for call in calls:
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and isinstance(call.get("id"), str):
            yield call["id"], name


def _template_message(index: int, message: pb.Message) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequest(
            f"{named(f'Messages[{index}]')} has no role: set user, assistant, system or tool"
        )
    content = message.content
    if message.role == "system" and _BILLING_LABEL in content:  # faster than the regular expression
        content = _BILLING.sub("", content)
    entry: dict[str, Any] = {"role": message.role, "content": content}
    for key in ("name", "tool_call_id"):
        if value := getattr(message, key):
            entry[key] = value
    if calls := _tool_calls(index, message.tool_calls):
        entry["tool_calls"] = calls
    if message.reasoning_content:
        entry |= dict.fromkeys(("reasoning_content", "reasoning"), message.reasoning_content)
        # gpt-oss has one field for content or reasoning before a call; its template rejects both.
        if not (calls and message.content):
            entry["thinking"] = message.reasoning_content
    return entry


def _tool_calls(index: int, text: str) -> list[dict[str, Any]]:
    field, what = f"Messages[{index}].tool_calls", "a JSON list of objects"
    calls = json_value(list, field, text, what)
    if not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{named(field)} must be {what}")
    return [_with_decoded_arguments(call) for call in calls]


def _with_decoded_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments decoded, if they are a JSON object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": _object_or_text(arguments)}}


def _object_or_text(text: str) -> Any:
    if not text.strip():
        return {}  # clients send this for a call without arguments; templates expect an object
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
