"""Conversations that a template refuses are rendered in the turns that it allows."""

from __future__ import annotations

import re

import pytest

from backend.engine.errors import InvalidRequest
from tests.engine.prompting.test_tool_support import BARE, CALL, HISTORY, _builder, _text

# Qwen3.5 has the first rule, Gemma 3 and Mistral the second, which ignores calls and results.
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (  # Gemma 2
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
)
FIRST_ONLY = (  # gpt-oss
    "{% set ns = namespace(shown=[]) %}{% for m in messages %}{% if loop.first or m.role !="
    " 'system' %}{% set ns.shown = ns.shown + [m] %}{% endif %}{% endfor %}"
    "{% set messages = ns.shown %}"
)
ALTERNATING = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role =="
    " 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.at % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.at = ns.at + 1 %}{% endif %}"
    "{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "It is late."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
DONE = {"role": "assistant", "content": "Done."}
SO = {"role": "user", "content": "So?"}
THEN = {"role": "user", "content": "Then?"}
TWICE = {**HISTORY[1], "tool_calls": [CALL, {**CALL, "id": "c2"}]}


@pytest.mark.parametrize(
    ("rules", "messages", "shown"),
    [
        (SYSTEM_FIRST, [SYSTEM, HI, HELLO, LATE, SO], ["Be brief.", "Hi", "Hello.", "late.\n\nSo"]),
        (SYSTEM_FIRST, [SYSTEM, LATE, HI], ["Be brief.\n\nIt is late.", "Hi"]),
        (FIRST_ONLY, [SYSTEM, HI, HELLO, LATE, SO], ["Be brief.", "Hi", "Hello.", "late.\n\nSo"]),
        (FIRST_ONLY, [SYSTEM, LATE, HI], ["Be brief.\n\nIt is late.", "Hi"]),
        (ALTERNATING, [SYSTEM, HI, SO], ["Be brief.", "Hi\n\nSo?"]),
        (ALTERNATING, [HI, HELLO, HELLO, SO], ["Hi", "Hello.\n\nHello.", "So?"]),
        (ALTERNATING, [*HISTORY, SO], ["-3°", "\n\nSo?"]),
        (ALTERNATING, [*HISTORY[:2], SO], ["Is it cold?", "tool\nSo?"]),
        (ALTERNATING, [*HISTORY, HISTORY[1], SO, HELLO, THEN], ["-3°", "So?", "Hello.", "Then?"]),
        (ALTERNATING, [HI, TWICE, HISTORY[2], SO], ["-3°", "tool\nSo?"]),
        (ALTERNATING, [HELLO, SO], ["Hello.", "So?"]),
        (ALTERNATING, [HISTORY[2], HELLO, SO], ["tool\n-3°", "Hello.", "So?"]),
        (ALTERNATING, [HELLO, HISTORY[2], DONE, SO], ["Hello.", "tool\n-3°", "Done.", "So?"]),
        (ALTERNATING, [SYSTEM, HELLO, SO], ["system\nBe brief.", "Hello.", "So?"]),
        (NO_SYSTEM + ALTERNATING, [SYSTEM, HELLO, SO], ["user\nBe brief.", "Hello.", "So?"]),
        (NO_SYSTEM, [SYSTEM, HI, HELLO, LATE, SO], ["Be brief.\n\nHi", "Hello.", "late.\n\nSo"]),
        (ALTERNATING + SYSTEM_FIRST, [HI, LATE, HELLO, SO], ["Hi\n\nIt is late.", "Hello.", "So?"]),
    ],
)
def test_a_refused_conversation_is_shown_in_strict_turns(
    rules: str, messages: list[dict[str, object]], shown: list[str]
) -> None:
    text = _text(_builder(rules + BARE), *messages)
    places = [text.index(words) for words in shown]
    assert places == sorted(places)
    assert text.endswith("<|im_start|>assistant\n")


def test_calls_get_short_ids_if_the_template_requires_them() -> None:
    """The templates of Mistral 7B 0.3 and Mistral Nemo require them."""
    rule = "{% if id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    shown = rule + "<{{ id }}>"
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set id = c.id %}"
        f"{shown}{{% endfor %}}{{% if m.tool_call_id %}}{{% set id = m.tool_call_id %}}{shown}"
        "{% endif %}{% endfor %}"
    )
    text = _text(_builder(template), *HISTORY)
    called, answered = re.findall(r"<(\w+)>", text)
    assert called == answered
    assert _text(_builder(template), *HISTORY, HELLO).startswith(text)
    own = {**HISTORY[1], "tool_calls": [{**CALL, "id": "a1B2c3D4e"}]}
    assert "<a1B2c3D4e>" in _text(_builder(template), HI, own)


def test_calls_are_shown_one_by_one_if_the_template_requires_it() -> None:
    """The templates of Llama 3.1 to 3.3 require it."""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only single tool-calls') }}{% endif %}"
        "({{ m.tool_calls[0].function.name }} {{ m.content }})"
        "{% else %}<{{ m.role }} {{ m.content }}>{% endif %}{% endfor %}"
    )
    called = {**TWICE, "content": "Both."}
    results = [{**HISTORY[2], "tool_call_id": call, "content": call} for call in ("c2", CALL["id"])]
    text = _text(_builder(template), HI, called, *results, SO)
    name = "get_weather"
    first, second = f"({name} Both.)<tool {CALL['id']}>", f"({name} )<tool c2>"
    assert text == f"<user Hi>{first}{second}<user So?>"
    unanswered = _text(_builder(template), HI, called, results[1], SO)
    assert unanswered == f"<user Hi>{first}({name} )<user So?>"


def test_arguments_without_an_end_become_an_object_if_the_template_requires_one() -> None:
    """Those of Qwen3-Coder, GLM and MiniMax do; an agent sends such a call back with its error."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}<{{ key }}={{ value }}>{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    function = {"name": "forecast", "arguments": '{"place": "Ro'}
    called = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}
    assert '<arguments={"place": "Ro>' in _text(_builder(template), HI, called, HISTORY[2])


def test_a_conversation_that_the_template_takes_is_not_changed() -> None:
    text = _text(_builder(BARE), HI, LATE, SO)
    assert "<|im_start|>system\nIt is late.<|im_end|>\n<|im_start|>user\nSo?" in text


def test_what_no_turns_help_is_refused_with_the_first_reason() -> None:
    rules = "{% if messages[0].role == 'user' %}{{ raise_exception(messages | length) }}{% endif %}"
    with pytest.raises(InvalidRequest, match="refused Messages: 2"):
        _text(_builder(rules + BARE), HI, SO)
