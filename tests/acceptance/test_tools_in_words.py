"""Tools described in text, for a model whose template does not render them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.backend import TINY_TEXT, WAIT, Backend, chat, refusal
from tests.acceptance.test_chat import TOOLS, WEATHER
from tests.acceptance.test_constraints import TIME
from tests.polling import until
from tests.rpc.localai_host import Seen, streamed, unary
from wire import backend_pb2 as pb

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NAMED = json.dumps({"type": "function", "function": {"name": "get_time"}})
CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without its template, and with its tool tokens renamed."""
    copy = tmp_path_factory.mktemp("models") / "toolless"
    shutil.copytree(TINY_TEXT, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = (copy / "tokenizer.json").read_text()
    for name in ("tool_call", "tool_response"):
        for token in (f"<{name}>", f"</{name}>"):
            tokenizer = tokenizer.replace(json.dumps(token), json.dumps(f"[{token[1:-1]}]"))
    (copy / "tokenizer.json").write_text(tokenizer)
    return copy


@pytest.fixture
def toolless(reused: Backend, model: Path) -> Backend:
    return reused.holding(model)


def _count(backend: Backend, request: pb.PredictOptions) -> int:
    counted = pb.PredictOptions()
    counted.CopyFrom(request)
    counted.Metadata["mlx.count_only"] = "true"
    reply: pb.Reply = backend.stub.Predict(counted, timeout=WAIT)
    return reply.prompt_tokens


def _ask(backend: Backend, request: pb.PredictOptions) -> Seen:
    """Ask with a unary call and with a stream; a host's client must get the same from both."""
    tools = bool(request.Tools)
    whole = unary(backend.stub.Predict(request, timeout=WAIT), tools=tools)
    stream = streamed(backend.stub.PredictStream(request, timeout=WAIT), tools=tools)
    assert (whole.content, whole.calls) == (stream.content, stream.calls)
    assert not whole.invented
    assert not stream.invented
    return whole


def test_tools_are_described_in_the_prompt(toolless: Backend) -> None:
    bare = _count(toolless, chat("What is the weather?"))
    shown = _count(toolless, chat("What is the weather?", Tools=TOOLS))
    more = _count(toolless, chat("What is the weather?", Tools=json.dumps([WEATHER, TIME])))
    assert bare < shown < more
    hidden = chat("What is the weather?", Tools=TOOLS, ToolChoice="none")
    assert _count(toolless, hidden) == bare


def test_a_prompt_without_tools_is_what_the_template_renders(toolless: Backend) -> None:
    rendered = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    messages, raw = chat("What is 3 + 4?"), pb.PredictOptions(Prompt=rendered)
    assert _count(toolless, messages) == _count(toolless, raw)


def test_calls_and_results_in_the_history_are_in_the_prompt(toolless: Backend) -> None:
    history = chat("What is the weather in Paris?")
    history.Messages.add(role="assistant", tool_calls=json.dumps([CALL]))
    history.Messages.add(role="tool", tool_call_id="call_1", content="21 degrees")
    rendered = (
        "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n21 degrees\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert _count(toolless, history) == _count(toolless, pb.PredictOptions(Prompt=rendered))
    shown = pb.PredictOptions()
    shown.CopyFrom(history)
    shown.Tools = TOOLS
    assert _count(toolless, shown) > _count(toolless, history)


@pytest.mark.parametrize("heat", [{}, {"Temperature": 1.2, "TopP": 1.0, "Seed": 7}])
def test_a_required_call_is_written_by_grammar(toolless: Backend, heat: dict[str, Any]) -> None:
    tools = json.dumps([_closed(WEATHER, "city", "Paris", "Rome"), TIME])
    single = {"enable_thinking": "false", "mlx.parallel_tool_calls": "false"}
    allowed = {
        "get_time": [{"zone": "UTC"}, {"zone": "CET"}],
        "get_weather": [{"city": "Paris"}, {"city": "Rome"}],
    }
    for choice in ('"required"', NAMED):
        asked = chat("And now?", Tools=tools, ToolChoice=choice, Metadata=single, **heat)
        seen = _ask(toolless, asked)
        assert seen.content == ""
        ((name, arguments),) = seen.calls
        assert name == "get_time" or choice != NAMED
        assert json.loads(arguments) in allowed[name]


def _closed(tool: dict[str, Any], argument: str, *values: str) -> dict[str, Any]:
    """The tool with few values for its one argument, so that a random call comes to an end."""
    schema = {
        "type": "object",
        "properties": {argument: {"enum": values}},
        "required": [argument],
    }
    return {**tool, "function": {**tool["function"], "parameters": schema}}


def test_a_call_is_parsed_only_if_tools_are_offered(toolless: Backend) -> None:
    """The grammar makes the model write the same text in both requests."""
    lark = f"start: {json.dumps(WRITTEN)}"
    metadata = {"enable_thinking": "false", "mlx.grammar_type": "lark"}
    written = chat("What is the weather?", Grammar=lark, Metadata=metadata)
    reply = toolless.stub.Predict(written, timeout=WAIT)
    assert reply.message.decode() == WRITTEN
    written.Tools = TOOLS
    seen = _ask(toolless, written)
    assert [(name, json.loads(arguments)) for name, arguments in seen.calls] == [
        ("get_weather", {"city": "Rome"})
    ]
    assert seen.content == ""


def test_metadata_names_the_format_of_calls(toolless: Backend) -> None:
    metadata = toolless.stub.ModelMetadata(pb.ModelOptions(), timeout=WAIT)
    assert metadata.tool_format.format_type == "hermes"
    assert metadata.tool_format.section_start == "<tool_call>"
    assert metadata.supports_thinking
    assert "tool" not in metadata.rendered_template


def test_a_configured_format_without_calls_is_kept(model: Path, bare: Backend) -> None:
    assert bare.load(model, Options=["tool_parser:plain"]).success
    until(lambda: any("does not render tools" in line for line in bare.log))
    sentence = refusal(bare, chat("Hi", Tools=TOOLS, ToolChoice="required"))
    assert "another tool_parser" in sentence
    assert "auto" not in sentence
