"""Messages of every role reach the model, or are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load

from backend.engine.errors import InvalidRequest
from backend.engine.prompting.prompts import PromptBuilder
from backend.engine.prompting.roles import Roles
from backend.engine.request import ChatPrompt

TINY_TEXT = Path(__file__).parents[2] / "models" / "tiny_text"
QUESTION = {"role": "user", "content": "Who are you?"}
QWEN = """
{%- for message in messages %}
    {%- if message.role in ["system", "user", "assistant", "tool"] %}
        {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}"""


@cache
def _builder() -> PromptBuilder:
    tokenizer: Any = load(TINY_TEXT)
    tokenizer.chat_template = QWEN
    return PromptBuilder(tokenizer, 4096, 1 << 20)


def _tokens(role: str) -> list[int]:
    """The prompt of a conversation with a message of this role; Qwen's templates show no others."""
    first = {"role": role, "content": "Be brief."}
    return _builder().build(ChatPrompt((first, QUESTION))).tokens


@pytest.mark.parametrize(("role", "known"), [("developer", "system"), ("function", "tool")])
def test_openais_other_names_of_a_role_are_shown(role: str, known: str) -> None:
    assert _tokens(role) == _tokens(known)


@pytest.mark.parametrize("role", ["System", "my role", "human"])
def test_a_message_that_the_template_leaves_out_is_refused(role: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"Messages\[0\].* has the role '{role}', which"):
        _tokens(role)


@pytest.mark.parametrize("role", ["developer", "function"])
def test_half_a_surrogate_pair_does_not_hide_a_message(role: str) -> None:
    def tokens(text: str) -> list[int]:
        return _builder().build(ChatPrompt((QUESTION, {"role": role, "content": text}))).tokens

    assert tokens("cut \ud83d off") == tokens("cut \ufffd off")


def test_a_later_system_message_with_half_a_surrogate_pair_stays_where_it_is() -> None:
    prompts = [
        _builder().render(ChatPrompt((QUESTION, {"role": "system", "content": f"cut {end}"})))
        for end in ("\ud83d", "\ufffd")
    ]
    assert prompts[0] == prompts[1]
    assert prompts[0].index("Who are you?") < prompts[0].index("cut")


def test_an_empty_message_may_be_left_out() -> None:
    empty = {"role": "my role", "content": " "}
    assert _builder().build(ChatPrompt((empty, QUESTION))).tokens


@pytest.mark.parametrize("template", ["{% if role == 'developer' %}", {"a": '"developer"'}])
def test_a_role_that_the_template_knows_is_unchanged(template: Any) -> None:
    messages = ({"role": "developer", "content": "a"},)
    roles = Roles(template)
    assert roles.replaced(messages) == messages
    roles.require_shown(messages, "which may not contain its text")


def test_a_template_in_python_may_show_any_role() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "a "}]
    messages = ({"role": "my role", "content": parts},)
    Roles(None).require_shown(messages, "my role: a")
    with pytest.raises(InvalidRequest):
        Roles(None).require_shown(messages, "nothing")
