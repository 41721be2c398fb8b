"""Normalises conversations to the order and form in which mistral-common renders them.

mistral-common's tokenizers v3 to v13 merge neighbouring messages of the same role, give JSON
uniform spacing, and write only some fields of tools.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_APART = "\n\n"  # between merged texts or messages
_SORTS = 11  # from this version on, results are sorted in the order of their calls
_SEVENTH = 7  # before this version, the system prompt is in the last question, and results are JSON

Message = dict[str, Any]


def settled_messages(messages: Iterable[Mapping[str, Any]], version: int) -> list[Message]:
    """Return the messages in the form that the template expects."""
    settled: list[Message] = []
    for role, group in itertools.groupby(messages, lambda message: message.get("role")):
        together = list(group)
        if role == "user":
            settled.append({"role": role, "content": _content(together)})
        elif role == "assistant":
            settled.append(_assistant(together))
        elif role == "tool":
            calls = settled[-1].get("tool_calls") if settled else None
            settled += _results(together, calls or (), version)
        elif version >= _SEVENTH:
            settled += [{**message, "content": _content([message])} for message in together]
        else:
            settled += map(dict, together)
    if version >= _SEVENTH:
        return settled
    system = [message for message in settled if message.get("role") in ("system", "developer")]
    texts = [text for message in system if (text := _content([message]))]
    first = [{"role": "system", "content": _APART.join(map(str, texts))}] if texts else []
    return [*first, *(message for message in settled if message not in system)]


def settled_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools with only the fields that mistral-common writes, in the same order."""
    if not tools:
        return None
    functions = [tool.get("function") or {} for tool in tools]
    return [
        {
            "type": "function",
            "function": {
                "name": function.get("name"),
                "description": function.get("description") or "",
                "parameters": function.get("parameters") or {},
            },
        }
        for function in functions
    ]


def _content(messages: Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """Merge the contents of messages: to a string, or to parts if a part is not text."""
    parts: list[Any] = []
    for message in messages:
        content = message.get("content") or ()
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            text = part.get("text") if part.get("type") == "text" else None
            if text is None:
                parts.append(part)
            elif text and parts and parts[-1].get("type") == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + _APART + text}
            elif text:
                parts.append({"type": "text", "text": text})
    if all(part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _assistant(messages: Sequence[Mapping[str, Any]]) -> Message:
    content = _content(messages)
    if isinstance(content, str):
        content = content.rstrip(" ")
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
        for message in messages
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    return _read(arguments or "{}") if isinstance(arguments, str | None) else arguments


def _results(
    messages: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]], version: int
) -> list[Message]:
    results = [{**message, "content": _content([message])} for message in messages]
    if version < _SEVENTH:  # a result is embedded in JSON text
        results = [{**result, "content": _read(result["content"] or "{}")} for result in results]
    if version >= _SORTS:
        order = {call.get("id"): at for at, call in enumerate(calls)}
        results.sort(key=lambda result: order.get(result.get("tool_call_id"), len(order)))
    return results


def _read(text: Any) -> Any:
    """Return the value of a JSON string; the argument itself if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text
