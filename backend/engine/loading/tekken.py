"""Supports tokenizers in Mistral's format: a `tekken.json`, often without a chat template.

transformers reads the vocabulary. Only mistral-common knows the names of the special tokens and the
format of conversations; this module follows its instruct tokenizers v3 to v13
(`tests/engine/tekken` compares the tokens).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from backend.engine.loading.chat_templates import has_template
from backend.engine.loading.tekken_messages import settled_messages, settled_tools

_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# For messages and tools that `tekken_messages` has normalised.
_TEMPLATE = """
{%- macro text(content) %}
  {%- if content is string %}{{- content }}
  {%- else %}
    {%- for part in content or [] %}
      {%- if part.type == "text" %}{{- part.text }}
      {%- elif part.type == "image" %}{{- "[IMG]" }}
      {%- else %}{{- raise_exception("content of type " + part.type + " is not supported") }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
{%- endmacro %}
{%- set found = namespace(first=-1, last=-1) %}
{%- for message in messages %}
  {%- if message.role == "user" %}
    {%- set found.last = loop.index0 %}
    {%- if found.first < 0 %}{%- set found.first = loop.index0 %}{%- endif %}
  {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role in ("system", "developer") %}
    {%- if VERSION >= 7 %}
      {{- "[SYSTEM_PROMPT]" + text(message.content) + "[/SYSTEM_PROMPT]" }}
    {%- endif %}
  {%- elif message.role == "user" %}
    {%- if tools and loop.index0 == (found.first if VERSION >= 13 else found.last) %}
      {{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}
    {%- endif %}
    {{- "[INST]" }}
    {%- if VERSION < 7 and loop.index0 == found.last and messages[0].role == "system" %}
      {{- text(messages[0].content) + "\n\n" }}
    {%- endif %}
    {{- text(message.content) + "[/INST]" }}
  {%- elif message.role == "assistant" %}
    {{- text(message.content) }}
    {%- if message.tool_calls and VERSION >= 11 %}
      {%- for call in message.tool_calls %}
        {{- "[TOOL_CALLS]" + call.function.name }}
        {%- if VERSION < 13 and call.id %}{{- "[CALL_ID]" + call.id }}{%- endif %}
        {{- "[ARGS]" + call.function.arguments | tojson }}
      {%- endfor %}
    {%- elif message.tool_calls %}
      {{- "[TOOL_CALLS][" }}
      {%- for call in message.tool_calls %}
        {{- '{"name": ' + call.function.name | tojson }}
        {{- ', "arguments": ' + call.function.arguments | tojson }}
        {%- if call.id %}{{- ', "id": ' + call.id | tojson }}{%- endif %}
        {{- "}" + ("" if loop.last else ", ") }}
      {%- endfor %}
      {{- "]" }}
    {%- endif %}
    {{- eos_token }}
  {%- elif message.role == "tool" %}
    {%- if VERSION < 7 %}
      {{- '[TOOL_RESULTS]{"content": ' + message.content | tojson }}
      {{- ', "call_id": ' + message.tool_call_id | tojson + "}[/TOOL_RESULTS]" }}
    {%- elif VERSION < 13 %}
      {{- "[TOOL_RESULTS]" + message.tool_call_id + "[TOOL_CONTENT]" }}
      {{- text(message.content) + "[/TOOL_RESULTS]" }}
    {%- else %}
      {{- "[TOOL_RESULTS]" + text(message.content) + "[/TOOL_RESULTS]" }}
    {%- endif %}
  {%- else %}
    {{- raise_exception("role " + message.role + " is not one of system, user, assistant, tool") }}
  {%- endif %}
{%- endfor %}
"""


def of_tekken(path: Path) -> dict[str, Any]:
    """Return the arguments that transformers needs to load a folder's `tekken.json`.

    They are empty if the folder has a `tokenizer.json`, or no `tekken.json`. Raises ValueError for
    a file of the oldest format.
    """
    tekken = _read(path)
    if tekken is None:
        return {}
    if "special_tokens" not in tekken:
        raise ValueError("its tekken.json does not name its special tokens")
    known = _special(tekken)
    arguments: dict[str, Any] = {name: text for name, text in _NAMES.items() if text in known}
    if _is_written_here(path, known):
        arguments["chat_template"] = _TEMPLATE.replace("VERSION", str(_version(tekken)))
    return arguments


def settle_chats(tokenizer: Any, path: Path) -> None:
    """Let a tokenizer of mlx-lm that uses this module's template render as mistral-common does."""
    tekken = _read(path)
    if tekken is None or not _is_written_here(path, _special(tekken)):
        return
    version = _version(tekken)

    def render(messages: Any, *, tools: Any = None, **arguments: Any) -> Any:
        return tokenizer._tokenizer.apply_chat_template(
            settled_messages(messages, version),
            tools=settled_tools(tools),
            **arguments | {"tokenize": False},
        )

    tokenizer._chat_template = render


def _read(path: Path) -> dict[str, Any] | None:
    file = path / "tekken.json"
    if (path / "tokenizer.json").exists() or not file.is_file():
        return None
    tekken: dict[str, Any] = json.loads(file.read_bytes())
    return tekken


def _special(tekken: dict[str, Any]) -> set[str]:
    return {token["token_str"] for token in tekken.get("special_tokens") or ()}


def _version(tekken: dict[str, Any]) -> int:
    number = re.search(r"\d+", str(tekken["config"].get("version", "")))
    return int(number[0]) if number else 3


def _is_written_here(path: Path, special: set[str]) -> bool:
    return "[INST]" in special and not has_template(path)
