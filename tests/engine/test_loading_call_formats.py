"""Checkpoints whose calls are of no known family: derived at load, or described in their files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from backend.engine.load_request import LoadRequest
from backend.engine.loading.loader import load
from backend.engine.served_model import ServedModel
from common.chat_parser import parse_chat
from tests.engine.loading_models import CHAT_TEMPLATE, write_model
from tests.engine.loads import at_once

CALL = '<fn>{"name": "get_weather", "input": {"a": 1}}</fn>'
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"a": {}}}}
WRITTEN = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<fn>"
    '{"name": "{{ c.function.name }}", "input": {{ c.function.arguments|tojson }}}</fn>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}"
)
DESCRIBED = {
    "start_anchor": "<|im_start|>",
    "fields": {
        "thinking": {"open": "<muse>", "close": "</muse>"},
        "tool_calls": {
            "open": "<fn>",
            "close": "</fn>",
            "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.input}"}},
        },
    },
}


def served(path: Path, **fields: Any) -> ServedModel:
    write_model(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    _, _, model = at_once(load(LoadRequest("it", str(path)), 1, threading.Event()))
    return model


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {"chat_template": "{{ tools }}" + CHAT_TEMPLATE.replace("{{ m.content }}", WRITTEN)},
            "derived",
        ),
        (
            {"chat_template": "{{ tools }}" + CHAT_TEMPLATE, "response_template": DESCRIBED},
            "response_template",
        ),
    ],
)
def test_calls_of_no_known_family_are_read(
    fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    chat_format = served(tmp_path, **fields).format_of(tools=True)
    assert chat_format.name == name
    (call,) = parse_chat(CALL, chat_format, tools=[TOOL]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"a": 1})
