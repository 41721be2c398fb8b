"""A model that calls a tool once and then ends: enough for one turn of an agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc

from tests.gateway.numbers_backend import NumbersBackend
from wire import backend_pb2 as pb

# Agents' tools that change nothing, with arguments that they accept, the most likely first.
_HARMLESS = (
    *("exec_command", "shell", "run_shell_command", "bash", "run_commands", "terminal"),
    *("list", "list_dir", "list_directory", "read", "ls", "glob"),
)
_VALUES: dict[str, Any] = {"string": "ls", "integer": 1, "number": 1, "boolean": False}


class ScriptedModel(NumbersBackend):
    """Serves any model name."""

    def PredictStream(
        self, request: pb.PredictOptions, _context: grpc.ServicerContext
    ) -> Iterator[pb.Reply]:
        tools = json.loads(request.Tools or "[]")
        done = any(message.role == "tool" for message in request.Messages)
        tool = _chosen(tools) if not done and request.ToolChoice != '"none"' else None
        if done and request.ToolChoice == '"required"':  # agents that end with a tool of their own
            tool = tools[-1]["function"]
        if request.Grammar.startswith("{"):
            answer = pb.ChatDelta(content=json.dumps(example(json.loads(request.Grammar))))
        elif tool is None:
            answer = pb.ChatDelta(content="All done.")
        else:
            arguments = json.dumps(example(tool.get("parameters") or {}))
            call = pb.ToolCallDelta(id="call_1", name=tool["name"], arguments=arguments)
            answer = pb.ChatDelta(tool_calls=[call])
        yield pb.Reply(chat_deltas=[answer], tokens=3, prompt_tokens=9)
        yield pb.Reply(tokens=3, prompt_tokens=9)


def _chosen(tools: list[dict[str, Any]]) -> dict[str, Any] | None:
    functions: list[dict[str, Any]] = [tool["function"] for tool in tools]
    named = {function["name"].lower(): function for function in functions}
    for name in _HARMLESS:
        if name in named:
            return named[name]
    return functions[0] if len(functions) == 1 else None


def example(schema: dict[str, Any]) -> Any:
    """A value for a schema: its required parts only."""
    if "enum" in schema:
        return schema["enum"][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return example(schema[several][0])
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [example(schema.get("items", {"type": "string"}))]
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(properties.get(name, {})) for name in schema.get("required", ())}
    return _VALUES.get(kind)
