"""Constraints begin after reasoning, and reasoning is possible only where it may be."""

from __future__ import annotations

import json

import pytest

from backend.engine.constraints.spec import ConstraintSpec, spec_of_grammar
from backend.engine.errors import InvalidRequest
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from tests.common.grammar_walks import BYTES, ByteTokenizer, byte_tokenizer
from tests.engine.constraints.walks import allowed_ids, byte_walk, quick_compiler_for

SCHEMA = spec_of_grammar('{"type": "object", "properties": {}, "additionalProperties": false}')
TOOL = {"type": "function", "function": {"name": "tide", "parameters": None}}
CALLS = ConstraintSpec("calls", tools=(TOOL,))
TURN = "<|im_start|>assistant\n"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOKENIZERS = [byte_tokenizer(), byte_tokenizer(MARKERS), byte_tokenizer(plain=MARKERS)]
HERMES = ChatFormat.named("hermes", "qwen3")


def _first(tokenizer: ByteTokenizer, tail: str, thinking: bool | None = None, **more: bool) -> str:
    """The characters and markers that are allowed first."""
    constraint = quick_compiler_for(tokenizer, HERMES).compile(
        SCHEMA, prompt_tail=TURN + tail, answers_messages=more.get("chat", True), thinking=thinking
    )
    ids = allowed_ids(constraint, tokenizer.size)
    return "free" if len(ids) > 50 else "".join(tokenizer.text([token])[0] for token in ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_where_the_grammar_begins(tokenizer: ByteTokenizer) -> None:
    assert sorted(_first(tokenizer, "")) == ["<", "{"]
    assert _first(tokenizer, "", thinking=False) == "{"
    assert _first(tokenizer, "<think>\n") == "free"
    assert _first(tokenizer, "<think>\n", thinking=False) == "<"
    assert _first(tokenizer, "<think>\n\n</think>\n\n") == "{"
    assert _first(tokenizer, "<think>\n", chat=False) == "{"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("spec", [SCHEMA, CALLS])
@pytest.mark.parametrize("tail", ["", "<think>\n"])
def test_the_answer_is_parsed_apart_from_the_reasoning(
    tokenizer: ByteTokenizer, spec: ConstraintSpec, tail: str
) -> None:
    compiler = quick_compiler_for(tokenizer, HERMES)
    thought = 0
    for seed in range(12):
        constraint = compiler.compile(spec, prompt_tail=TURN + tail, answers_messages=True)
        text = byte_walk(tokenizer, seed, "</think>").text(constraint)
        message = parse_chat(text, HERMES, tools=spec.tools, prompt_tail=TURN + tail)
        thought += bool(message.reasoning_content)
        if spec is CALLS:
            assert message.tool_calls
            assert message.content == ""
        else:
            assert json.loads(message.content) == {}
    assert thought


@pytest.mark.parametrize("spec", [SCHEMA, CALLS])
@pytest.mark.parametrize("thinking", [None, False])
def test_harmony_writes_its_channel_headers(spec: ConstraintSpec, thinking: bool | None) -> None:
    markers = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
    tokenizer = byte_tokenizer(markers)
    chat_format = ChatFormat.named("openai")
    compiler = quick_compiler_for(tokenizer, chat_format)
    for tail in ("<|start|>assistant", "<|start|>assistant<|channel|>analysis<|message|>"):
        for seed in range(6):
            constraint = compiler.compile(
                spec, prompt_tail=tail, answers_messages=True, thinking=thinking
            )
            text = byte_walk(tokenizer, seed).text(constraint)
            message = parse_chat(text, chat_format, tools=spec.tools, prompt_tail=tail)
            assert bool(message.tool_calls) == (spec is CALLS), text
            assert spec is CALLS or json.loads(message.content) == {}
            assert thinking is None or not message.reasoning_content


def test_no_call_begins_in_the_reasoning() -> None:
    tokenizer = TOKENIZERS[0]
    constraint = quick_compiler_for(tokenizer, HERMES).compile(
        CALLS, prompt_tail=f"{TURN}<think>\n", answers_messages=True
    )
    for byte in b"So <tool_call":
        constraint.accept(byte)
    ids = allowed_ids(constraint, tokenizer.size)
    assert ord(">") not in ids
    assert len([token for token in ids if token < BYTES]) > 50


STRICT = ConstraintSpec("calls", tools=(TOOL,), optional=True)


@pytest.mark.parametrize("tail", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_strict_tools_constrain_calls_and_not_free_text(tail: str) -> None:
    tokenizer = byte_tokenizer(MARKERS)
    compiler = quick_compiler_for(tokenizer, HERMES)
    answered = called = 0
    for seed in range(30):
        constraint = compiler.compile(STRICT, prompt_tail=TURN + tail, answers_messages=True)
        text = byte_walk(tokenizer, seed, "</think>", "<tool_call>").text(constraint)
        message = parse_chat(text, HERMES, tools=STRICT.tools, prompt_tail=TURN + tail)
        answered += bool(message.content)
        called += bool(message.tool_calls)
        assert "<tool_call>" not in message.content
        assert all(json.loads(call.arguments) == {} for call in message.tool_calls)
    assert answered
    assert called


def test_strict_tools_need_a_token_that_marks_calls() -> None:
    for tokenizer in (byte_tokenizer(), byte_tokenizer(("<|python_tag|>",))):
        compiler = quick_compiler_for(tokenizer, ChatFormat.named("llama3_json"))
        with pytest.raises(InvalidRequest, match="strict tools cannot be enforced"):
            compiler.compile(STRICT, prompt_tail="", answers_messages=True)
