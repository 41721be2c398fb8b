"""A budget ends the reasoning of every family, whatever its form and the other constraints."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.constraints.constraint import AnswerRule
from backend.engine.constraints.spec import spec_of_grammar
from backend.engine.constraints.thinking_budget import ThinkingBudget, openings
from backend.engine.token_text import ByteStream, byte_level_alphabet
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser, parse_chat
from common.formats import families
from tests.common.grammar_walks import BYTES, ByteTokenizer, byte_tokenizer
from tests.engine.constraints.walks import allowed_ids, byte_walk, quick_compiler_for
from tests.long import TEST_LONG, examples

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "tide", "parameters": None}}
THINKERS = sorted({str(tags): name for name, tags in families.REASONING.items() if tags}.values())
HERMES = ChatFormat.named("hermes", "qwen3")
TURN = "<|im_start|>assistant\n"
WORDS = ["a", "b ", "\n", "é", "`", "\n```\n", '"', "{", "0"]


def encoded(tokenizer: ByteTokenizer, text: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def budget_of(
    most: int,
    chat_format: ChatFormat,
    tokenizer: ByteTokenizer,
    tail: str = "",
    rule: AnswerRule | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> ThinkingBudget:
    table = [bytes([byte]) for byte in range(BYTES)]
    alphabet = byte_level_alphabet()
    for piece, token in tokenizer.backend_tokenizer.get_vocab().items():
        if token >= BYTES:
            table.extend([b""] * (token + 1 - len(table)))
            table[token] = piece.encode()
        else:
            table[token] = bytes([alphabet[piece]])
    control = range(BYTES, tokenizer.size)
    return ThinkingBudget(
        most,
        lambda: ChatParser(chat_format, tools=tools, prompt_tail=tail),
        lambda: ByteStream(table.__getitem__, strip_first_space=False),
        lambda text: encoded(tokenizer, text),
        openings(chat_format, lambda text: encoded(tokenizer, text), control),
        rule,
    )


def markers_of(chat_format: ChatFormat) -> list[str]:
    grammar = chat_format.grammar
    found = [*grammar.openers, *grammar.closers]
    found += [marker for tags in grammar.tags for marker in (tags.opening, tags.closing)]
    return list(dict.fromkeys(found))


def write(budget: ThinkingBudget, tokenizer: ByteTokenizer, wanted: Sequence[int]) -> list[int]:
    """The answer of a model that prefers these tokens, as far as the masks allow them."""
    written: list[int] = []

    def take(token: int) -> None:
        written.append(token)
        budget.accept(token)

    for token in wanted:
        while len(allowed := allowed_ids(budget, tokenizer.size)) == 1 and token not in allowed:
            take(allowed[0])
        if token in allowed:
            take(token)
    while len(allowed := allowed_ids(budget, tokenizer.size)) == 1:
        take(allowed[0])
    return written


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", THINKERS)
@pytest.mark.parametrize("most", [0, 1, 7])
def test_every_family_s_reasoning_is_ended(name: str, special: bool, most: int) -> None:
    chat_format = ChatFormat.named("kimi_k3" if name == "kimi_k3" else None, name)
    for tags in chat_format.grammar.tags:
        names = markers_of(chat_format) if special else []
        tokenizer = byte_tokenizer(names)
        for tail, opening in ((tags.opening, ""), ("", tags.opening)):
            budget = budget_of(most, chat_format, tokenizer, TURN + tail)
            wanted = encoded(tokenizer, opening + "w" * 40)
            text = tokenizer.text(write(budget, tokenizer, wanted))
            message = parse_chat(text, chat_format, prompt_tail=TURN + tail)
            assert message.reasoning_content == "w" * most, text
            assert message.content == "w" * (40 - most), text


@pytest.mark.parametrize("most", [0, 3])
def test_gpt_oss_continues_in_another_channel(most: int) -> None:
    parts = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "analysis")
    tokenizer = byte_tokenizer(parts)
    harmony = ChatFormat.named("openai")
    budget = budget_of(most, harmony, tokenizer, "<|start|>assistant")
    wanted = encoded(tokenizer, "<|channel|>analysis<|message|>" + "w" * 9)
    written = write(budget, tokenizer, wanted)[: 3 + most + 1]
    assert tokenizer.text(written).endswith("w" * most + "<|end|>")
    budget.restart(written)
    for token in encoded(tokenizer, "<|start|>assistant<|channel|>"):
        budget.accept(token)
    allowed = allowed_ids(budget, tokenizer.size)
    assert encoded(tokenizer, "analysis")[0] not in allowed
    assert ord("f") in allowed


def test_an_end_that_has_begun_is_not_written_twice() -> None:
    tokenizer = byte_tokenizer()
    for most in range(3, 14):
        budget = budget_of(most, HERMES, tokenizer, f"{TURN}<think>\n")
        text = tokenizer.text(write(budget, tokenizer, encoded(tokenizer, "yes</think>\n\nFine.")))
        assert text == "yes</think>\n\nFine.", most


@pytest.mark.parametrize(
    ("thought", "ended"),
    [
        ("```py\nx = 1", "```py\nx = 1\n```\n</think>"),
        ("~~~~\nx = 11", "~~~~\nx = 11\n~~~~\n</think>"),
        ('the word "', 'the word "\n</think>'),
        ("eleven é", "eleven é</think>"),
    ],
)
def test_the_end_is_not_written_inside_a_quotation(thought: str, ended: str) -> None:
    """The last case is a character of two tokens that crosses the budget: it is not cut either."""
    tokenizer = byte_tokenizer(("<think>", "</think>"))
    most = len(thought.encode()) - ("é" in thought)
    budget = budget_of(most, HERMES, tokenizer, f"{TURN}<think>\n")
    written = write(budget, tokenizer, encoded(tokenizer, thought))
    written += write(budget, tokenizer, encoded(tokenizer, '```\nsaid" it'))
    text = tokenizer.text(written)
    assert text.startswith(ended), text
    message = parse_chat(text, HERMES, prompt_tail=f"{TURN}<think>\n")
    assert message.content == '```\nsaid" it'


def test_a_call_in_the_reasoning_is_not_interrupted() -> None:
    tokenizer = byte_tokenizer(("<think>", "</think>", "<tool_call>", "</tool_call>"))
    call = '<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>'
    tail = f"{TURN}<think>\n"
    budget = budget_of(36, HERMES, tokenizer, tail, tools=[TOOL])
    text = tokenizer.text(write(budget, tokenizer, encoded(tokenizer, f"So\n{call}\nthen")))
    message = parse_chat(text, HERMES, tools=[TOOL], prompt_tail=tail)
    assert [call.name for call in message.tool_calls] == ["tide"]
    assert text.startswith(f"So\n{call}")
    assert message.reasoning_content == "So"


def test_reasoning_does_not_start_again() -> None:
    tokenizer = byte_tokenizer(("<think>", "</think>"))
    budget = budget_of(2, HERMES, tokenizer, TURN)
    wanted = encoded(tokenizer, "<think>ab<think>c</think>d <think> e")
    text = tokenizer.text(write(budget, tokenizer, wanted))
    assert text == "<think>ab</think>c</think>d <think> e"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("most", [0, 5, 60])
def test_a_grammar_holds_after_the_reasoning(special: bool, most: int) -> None:
    tokenizer = byte_tokenizer(("<think>", "</think>") if special else ())
    schema = spec_of_grammar('{"type": "object", "properties": {}, "additionalProperties": false}')
    for tail in ("", "<think>\n"):
        for seed in range(8 if TEST_LONG else 2):
            rule = quick_compiler_for(tokenizer, HERMES).compile(
                schema, prompt_tail=TURN + tail, answers_messages=True
            )
            budget = budget_of(most, HERMES, tokenizer, TURN + tail, rule)
            text = byte_walk(tokenizer, seed, "</think>").text(budget)
            message = parse_chat(text, HERMES, prompt_tail=TURN + tail)
            assert json.loads(message.content) == {}, text
            assert len(message.reasoning_content.encode()) <= most + len("\n```\n")


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(THINKERS),
    most=st.integers(0, 12),
    opened=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_a_restarted_answer_continues_the_same_way(
    name: str, most: int, opened: bool, seed: int
) -> None:
    """After a preemption the rule is rebuilt from the delivered tokens."""
    chat_format = ChatFormat.named(None, name)
    choose = random.Random(seed)
    markers = markers_of(chat_format)
    tokenizer = byte_tokenizer(markers if choose.random() < 0.7 else ())
    tail = TURN + (chat_format.grammar.tags[0].opening if opened else "")
    budget = budget_of(most, chat_format, tokenizer, tail)
    wanted = "".join(choose.choice([*WORDS, *markers, *markers]) for _ in range(20))
    masks, written = [], []
    first = budget_of(most, chat_format, tokenizer, tail)
    for token in write(first, tokenizer, encoded(tokenizer, wanted)):
        masks.append(allowed_ids(budget, tokenizer.size))
        assert token in masks[-1]
        budget.accept(token)
        written.append(token)
    again = budget_of(most, chat_format, tokenizer, tail)
    for at in range(0, len(written), 3):
        again.restart(written[:at])
        assert allowed_ids(again, tokenizer.size) == masks[at]
