"""Writes tools, calls and results as plain text into messages, for templates without tools.

Calls are written in Hermes' format, so the Hermes parser can read the answers. The content of a
message may be text or a list of parts, which may include images and audio.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

Message = Mapping[str, Any]

_RESULTS = frozenset({"tool", "function"})
_USERS = _RESULTS | {"user"}
_SHORT = 9  # characters
_BEFORE = "You have tools. Each of these lines describes one, with a JSON schema of its arguments:"
_AFTER = """\
To use a tool, write a call in exactly this form, with its name and all arguments that it needs:
<tool_call>
{"name": "the tool's name", "arguments": {"an argument's name": "its value"}}
</tool_call>
Several calls may follow one another; write nothing after the last. What the tools say comes back \
between <tool_response> and </tool_response>. If no tool is of use, answer in words."""


def mentions_calls(messages: Iterable[Message]) -> bool:
    """Return whether the messages contain a tool call or a result."""
    return any(message.get("tool_calls") or message.get("role") in _RESULTS for message in messages)


def with_tools_as_text(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    system: bool = True,
    lists: bool = False,
) -> tuple[Message, ...]:
    """Return the messages with tools, calls and results written into their content.

    Results become user messages. A result is joined with a user message that follows it, so that
    roles still alternate.

    system: whether system messages are allowed; if not, the first user message describes the tools.
    lists: whether content must be a list of parts.
    """
    rewritten: list[Message] = []
    after_results = False
    for message in messages:
        result = message.get("role") in _RESULTS
        entry = _as_text(message)
        if after_results and message.get("role") in _USERS:
            before = rewritten.pop()["content"]
            entry = {**entry, "content": _joined(before, "\n" if result else "\n\n", entry)}
        rewritten.append(entry)
        after_results = result
    if tools:
        _introduce(rewritten, _introduction(tools), "system" if system else "user", lists=lists)
    return tuple(rewritten)


def in_strict_turns(messages: Sequence[Message], *, system: bool = True) -> tuple[Message, ...]:
    """Return the messages in the form that strict templates require.

    - Only the first message may be a system message; later ones become user messages.
    - User and assistant messages alternate: consecutive messages of one role are joined, and user
      text after results is joined to the last result.
    - An interrupted call gets an empty result. An empty user message is written before a result
      without a call, and before an answer or a result that begins a conversation.
    - Ids of calls have nine letters and digits, which older Mistral templates require. Arguments
      are an object, which other templates require.

    system: whether system messages are allowed at all.
    """
    strict: list[Message] = []
    missing: list[Message] = []  # an empty result for each call without one
    for message in map(_with_strict_calls, messages):
        role = "system" if message.get("role") == "developer" else message.get("role")
        begins = all(other["role"] == "system" for other in strict)
        if role == "system" and not (system and begins):
            role = "user"
        empty: Any = [] if isinstance(message.get("content"), list) else ""
        if role in _RESULTS:
            missing = _unanswered(missing, message)
        else:
            strict += missing
            missing = [_result_of(call, empty) for call in message.get("tool_calls") or ()]
        last = strict[-1] if strict else {"role": ""}
        uncalled = role in _RESULTS and last["role"] == "assistant" and not last.get("tool_calls")
        if uncalled or (begins and role not in ("system", "user")):
            last = {"role": "user", "content": empty}
            strict.append(last)
        answered = role == "user" and last["role"] in _RESULTS
        alone = role in _RESULTS or last.get("tool_calls")
        if answered or (role == last["role"] and not alone):
            content = _joined(_content(last), "\n\n", message)
            strict[-1] = {**message, **last, "content": content}
        else:
            strict.append({**message, "role": role})
    return tuple(strict)


def with_single_calls(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with one call in each message, followed by its result.

    The templates of Llama 3 refuse a message with several calls.
    """
    groups: list[list[Message]] = []  # a message with a call, and its results
    of_call: dict[object, list[Message]] = {}
    for message in messages:
        calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        if message.get("role") in _RESULTS and groups:
            of_call.get(message.get("tool_call_id"), groups[-1]).append(message)
        elif calls:
            alone = {**message, "content": [] if isinstance(message.get("content"), list) else ""}
            for at, call in enumerate(calls):
                groups.append([{**(alone if at else message), "tool_calls": [call]}])
                of_call[call.get("id")] = groups[-1]
        else:
            groups.append([message])
    return tuple(chain.from_iterable(groups))


def _unanswered(missing: Sequence[Message], result: Message) -> list[Message]:
    """Return the missing results, without the result that has arrived.

    A result whose id is unknown counts as the first missing result.
    """
    ids = [each["tool_call_id"] for each in missing]
    found = result.get("tool_call_id")
    at = ids.index(found) if found in ids else 0
    return [each for place, each in enumerate(missing) if place != at]


def _result_of(call: Mapping[str, Any], content: Any) -> Message:
    function = call.get("function")
    name = function.get("name", "") if isinstance(function, Mapping) else call.get("name", "")
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _with_strict_calls(message: Message) -> Message:
    """Return the message with short call ids and with arguments that are objects.

    The same id always becomes the same short id. Arguments that are text, because the model did not
    complete them, become an object that contains the text.
    """
    changed = dict(message)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            {**_with_object(call), "id": _short(call.get("id"))} for call in calls
        ]
    if message.get("tool_call_id"):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    return changed


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = {"arguments": function["arguments"]}
    return {**call, "function": {**function, "arguments": arguments}}


def _short(identity: Any) -> str:
    text = str(identity)
    if len(text) == _SHORT and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_SHORT]


def _as_text(message: Message) -> Message:
    if message.get("role") in _RESULTS:
        opened = _joined("<tool_response>", "\n", message)
        closed = {"content": "</tool_response>"}
        return {"role": "user", "content": _joined(opened, "\n", closed)}
    calls = message.get("tool_calls")
    if not calls:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    written = {"content": "\n".join(map(_call, calls))}
    return {**rest, "content": _joined(_content(message), "\n", written)}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    entry = function if isinstance(function, Mapping) else call
    named = {"name": entry.get("name", ""), "arguments": entry.get("arguments", {})}
    return f"<tool_call>\n{_json(named)}\n</tool_call>"


def _introduction(tools: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([_BEFORE, *(_json(_described(tool)) for tool in tools), "", _AFTER])


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tool without `strict`, which is for the grammar and not for the model."""
    function = tool.get("function")
    entry = function if isinstance(function, Mapping) else tool
    return {key: value for key, value in entry.items() if key != "strict" and value is not None}


def _introduce(messages: list[Message], text: str, role: str, *, lists: bool) -> None:
    """Add the text to the system message, or in front of the first user message."""
    first: Message = {"content": [{"type": "text", "text": text}] if lists else text}
    if role == "system" and messages and messages[0].get("role") == "system":
        messages[0] = {**messages[0], "content": _joined(messages[0]["content"], "\n\n", first)}
        return
    places = (at for at, message in enumerate(messages) if message.get("role") == "user")
    at = None if role == "system" else next(places, None)
    if at is None:
        messages.insert(0, {"role": role, **first})
    else:
        messages[at] = {**messages[at], "content": _joined(first["content"], "\n\n", messages[at])}


def _joined(before: Any, gap: str, message: Message) -> Any:
    """Return two contents joined, with `gap` between them if neither is empty."""
    after = _content(message)
    if isinstance(before, str) and isinstance(after, str):
        return before + (gap if before and after else "") + after
    parts = [*_parts(before), *([{"type": "text", "text": gap}] if before and after else [])]
    return [*parts, *_parts(after)]


def _content(message: Message) -> Any:
    content = message.get("content")
    return "" if content is None else content


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
