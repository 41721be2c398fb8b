"""What templates render of tools, and prompts for templates that render none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.tokenizer_utils import load

from backend.engine.prompting.chat_format import ToolSupport, call_format, learn
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.request import ChatPrompt
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat

TINY_TEXT = Path(__file__).parents[2] / "models" / "tiny_text"
OWN = (TINY_TEXT / "chat_template.jinja").read_text()
BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + BARE
)
CALLS_ALONE = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
UNWILLING = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + BARE
IN_THE_SYSTEM = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'system' %}{{ tools }}{% endif %}"
    "{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {}}}
ASKED = {"role": "user", "content": "Is it cold?"}
HISTORY = (
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "-3°<|im_end|>"},
)


def _refuse(words: str) -> None:
    raise TemplateError(words)


@cache
def _tokenizer() -> Any:
    return load(TINY_TEXT)


class _Renders:
    """The tiny model's tokenizer with another template."""

    has_chat_template = True

    def __init__(self, template: str) -> None:
        environment = ImmutableSandboxedEnvironment()
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)

    def __getattr__(self, name: str) -> Any:
        return getattr(_tokenizer(), name)

    def apply_chat_template(self, messages: Any, tokenize: bool, **arguments: Any) -> str:
        assert not tokenize
        return self._template.render(messages=messages, **arguments)


def _builder(template: str) -> PromptBuilder:
    renders: Any = _Renders(template)
    return PromptBuilder(renders, 1 << 20, 1 << 20)


def _text(builder: PromptBuilder, *messages: dict[str, Any], tools: Any = None) -> str:
    return str(_tokenizer().decode(builder.build(ChatPrompt(messages, tools)).tokens))


@pytest.mark.parametrize(
    ("template", "support"),
    [
        (OWN, ToolSupport(tools=True, calls=True, system=True)),
        (IN_THE_SYSTEM, ToolSupport(tools=True, calls=False, system=True)),
        (BARE, ToolSupport(tools=False, calls=False, system=True)),
        (UNWILLING, ToolSupport(tools=False, calls=False, system=True)),
        (CALLS_ALONE, ToolSupport(tools=False, calls=True, system=True)),
        (NO_SYSTEM, ToolSupport(tools=False, calls=False, system=False)),
        ("{{ raise_exception('never') }}", None),
    ],
)
def test_what_a_template_renders_of_tools(template: str, support: ToolSupport | None) -> None:
    assert learn(_builder(template).sample) == support


@pytest.mark.parametrize("reasoning", ["", "qwen3"])
@pytest.mark.parametrize(
    ("template", "format_name", "parser", "answers", "described"),
    [
        (BARE, "plain", "", "hermes", True),
        (BARE, "plain", "no such parser", "hermes", True),
        (BARE, "plain", "Plain", "plain", False),
        (BARE, "hermes", "", "hermes", True),
        (BARE, "mistral", "mistral", "mistral", False),
        (OWN, "plain", "", "hermes", False),
        (OWN, "plain", "plain", "plain", False),
        (OWN, "hermes", "", "hermes", False),
    ],
)
def test_tools_are_described_in_text_if_nothing_else_renders_them(
    template: str, format_name: str, parser: str, answers: str, described: bool, reasoning: str
) -> None:
    builder = _builder(template)
    chat_format = ChatFormat.named(format_name, reasoning)
    other = call_format(chat_format, parser, builder) or chat_format
    assert other.name == answers
    assert other.reasoning_markers == chat_format.reasoning_markers
    assert ("To use a tool" in _text(builder, ASKED, tools=(TOOL,))) == (
        described or template == OWN
    )
    assert _text(builder, ASKED) == _text(_builder(template), ASKED)


def _telling(template: str) -> PromptBuilder:
    builder = _builder(template)
    assert call_format(ChatFormat.named("plain"), "", builder) is not None
    return builder


def test_calls_in_the_history_are_described_without_tools_too() -> None:
    described = _text(_telling(BARE), *HISTORY)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>' in described
    assert "<tool_response>\n-3°<|im_end|>\n</tool_response>" in described
    assert "To use a tool" not in described
    shown = _telling(CALLS_ALONE)
    assert _text(shown, *HISTORY) == _text(_builder(CALLS_ALONE), *HISTORY)
    assert "<tool_response>" in _text(shown, *HISTORY, tools=(TOOL,))


def test_a_result_cannot_write_control_tokens() -> None:
    end = _tokenizer().convert_tokens_to_ids("<|im_end|>")
    tokens = _telling(BARE).build(ChatPrompt(HISTORY, (TOOL,))).tokens
    assert tokens.count(end) == 4  # in the system message, the question, the answer, the results


def test_a_template_without_a_system_gets_the_tools_before_the_question() -> None:
    builder = _telling(NO_SYSTEM)
    result = HISTORY[-1]
    described = _text(builder, *HISTORY, result, tools=(TOOL,))
    first, _, rest = described.partition("<|im_end|>")
    assert json.dumps(TOOL["function"]) in first
    assert first.endswith("Is it cold?")
    assert rest.count("<tool_response>") == 2


def test_a_begun_answer_stays_at_the_end() -> None:
    begun = {"role": "assistant", "content": "It is"}
    built = _telling(BARE).build(ChatPrompt((*HISTORY, begun), (TOOL,), continues=True))
    text = _tokenizer().decode(built.tokens)
    assert "get_weather" in text
    assert text.endswith("assistant\nIt is")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (OWN, set()),
        (BARE, set()),
        ("Effort: {{ reasoning_effort }}" + BARE, {"reasoning_effort"}),
        ("{# reasoning_effort #}" + BARE, set()),
        (
            "{% if enable_thinking and thinking_budget %}{{ thinking_budget }}{% endif %}" + BARE,
            {"thinking_budget"},
        ),
    ],
)
def test_argument_names_of_a_template_for_reasoning(template: str, words: set[str]) -> None:
    assert PromptBuilder(_Renders(template), 4096, 512).known_words() == words


NEW = BARE.replace(
    "{{ m.content }}",
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<fn>"
    '{"name": "{{ c.function.name }}", "input": {{ c.function.arguments|tojson }}}</fn>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}",
).replace("{% for m", "{{ tools }}{% for m", 1)
HERMES = ChatFormat.named("hermes")
ODD = NEW.replace(
    '{"name": "{{ c.function.name }}", "input": {{ c.function.arguments|tojson }}}',
    "{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}{{ k }} is {{ v }}\n{% endfor %}",
)


def test_a_call_format_that_nobody_wrote_down_is_derived(caplog: pytest.LogCaptureFixture) -> None:
    found = call_format(ChatFormat.named("plain", "qwen3"), "", _builder(NEW))
    assert found is not None
    text = '<think>So.</think><fn>{"name": "get_weather", "input": {"a": 1}}</fn>'
    message = parse_chat(text, found, tools=[TOOL])
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("get_weather", '{"a": 1}')
    ]
    assert message.reasoning_content == "So."
    assert not caplog.records


def test_a_form_that_every_format_reads_is_still_derived() -> None:
    """Forced calls must have the form that the template renders."""
    template = NEW.replace("fn>", "tools>")
    text = '<tools>{"name": "get_weather", "input": {"a": 1}}</tools>'
    assert parse_chat(text, HERMES, tools=[TOOL]).tool_calls
    found = call_format(HERMES, "", _builder(template))
    assert found is not None
    assert found.name == "derived"
    assert found.tool_call_markers == ("<tools>", "</tools>")


def test_another_known_format_is_taken_if_its_calls_are_rendered() -> None:
    """The signs of DeepSeek V4's calls are not in its template, which puts them together."""
    written = (
        "{% if m.tool_calls %}{% set d = '｜DSML｜' %}<{{ d }}tool_calls>\n"
        '{% for c in m.tool_calls %}<{{ d }}invoke name="{{ c.function.name }}">\n'
        "{% for k, v in c.function.arguments.items() %}"
        '<{{ d }}parameter name="{{ k }}" string="true">{{ v }}</{{ d }}parameter>\n{% endfor %}'
        "</{{ d }}invoke>\n{% endfor %}</{{ d }}tool_calls>"
        "{% else %}{{ m.content }}{% endif %}"
    )
    template = "{{ tools }}" + BARE.replace("{{ m.content }}", written)
    detected = ChatFormat.detect(template, ())
    assert detected.name == "deepseek_v32"
    found = call_format(detected, "", _builder(template))
    assert found is not None
    assert found.name == "deepseek_v4"


def test_a_template_without_calls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert call_format(ChatFormat.named("plain"), "", _builder("{{ tools }}" + BARE)) is None
    (record,) = caplog.records
    assert "renders tools but no calls" in record.getMessage()


def test_calls_that_no_format_reads_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for template, parser in ((ODD, ""), (NEW, "mistral")):
        caplog.clear()
        chat_format = ChatFormat.named(parser or "plain")
        assert call_format(chat_format, parser, _builder(template)) is None
        (record,) = caplog.records
        assert "zyx_wvu" in record.getMessage()
        assert "set tool_parser" in record.getMessage()
