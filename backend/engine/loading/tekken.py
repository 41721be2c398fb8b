"""Tokenizers in Mistral's own form: a `tekken.json`, often without any chat template beside it.

transformers reads the vocabulary. The names of the special tokens, and how a conversation is
written, are known to mistral-common alone; its instruct tokenizers v3 to v13 are followed here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_TEMPLATE = """
{%- macro text(content) %}
  {%- if content is string %}{{- content }}
  {%- else %}
    {%- for part in content or [] %}
      {%- if part.type == "text" %}{{- part.text }}
      {%- elif part.type == "image" %}{{- "[IMG]" }}
      {%- else %}{{- raise_exception("content of type " + part.type + " is not understood") }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
{%- endmacro %}
{%- macro arguments(call) %}
  {%- if call.function.arguments is string %}{{- call.function.arguments }}
  {%- else %}{{- call.function.arguments | tojson }}
  {%- endif %}
{%- endmacro %}
{%- set found = namespace(system="", first=-1, last=-1) %}
{%- for message in messages %}
  {%- if message.role in ("system", "developer") %}
    {%- set found.system = found.system + text(message.content) + "\n\n" %}
  {%- elif message.role == "user" %}
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
    {%- if VERSION < 7 and loop.index0 == found.last %}{{- found.system }}{%- endif %}
    {{- text(message.content) + "[/INST]" }}
  {%- elif message.role == "assistant" %}
    {{- text(message.content) }}
    {%- if message.tool_calls and VERSION >= 11 %}
      {%- for call in message.tool_calls %}
        {{- "[TOOL_CALLS]" + call.function.name }}
        {%- if VERSION < 13 %}{{- "[CALL_ID]" + call.id }}{%- endif %}
        {{- "[ARGS]" + arguments(call) }}
      {%- endfor %}
    {%- elif message.tool_calls %}
      {{- "[TOOL_CALLS][" }}
      {%- for call in message.tool_calls %}
        {{- '{"name": ' + call.function.name | tojson + ', "arguments": ' + arguments(call) }}
        {{- ', "id": ' + call.id | tojson + "}" + ("" if loop.last else ", ") }}
      {%- endfor %}
      {{- "]" }}
    {%- endif %}
    {{- eos_token }}
  {%- elif message.role == "tool" %}
    {%- if VERSION < 7 %}
      {{- '[TOOL_RESULTS]{"content": ' + text(message.content) | tojson }}
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
    """Arguments that transformers needs for a folder's `tekken.json`; none if the folder has a
    `tokenizer.json`, or neither file."""
    file = path / "tekken.json"
    if (path / "tokenizer.json").exists() or not file.is_file():
        return {}
    tekken = json.loads(file.read_bytes())
    known = {token["token_str"] for token in tekken.get("special_tokens") or ()}
    arguments: dict[str, Any] = {name: text for name, text in _NAMES.items() if text in known}
    if not _has_template(path) and "[INST]" in known:
        version = re.search(r"\d+", str(tekken["config"].get("version", "")))
        arguments["chat_template"] = _TEMPLATE.replace("VERSION", version[0] if version else "3")
    return arguments


def _has_template(path: Path) -> bool:
    if (path / "chat_template.jinja").exists():
        return True
    settings = path / "tokenizer_config.json"
    return settings.exists() and "chat_template" in json.loads(settings.read_bytes())
