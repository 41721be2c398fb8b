"""Places are lengths that the next prompt really shares, whatever the template rewrites."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from backend.engine.prompting.prompts import BuiltPrompt, PromptBuilder
from backend.engine.prompting.token_positions import TokenPositions
from backend.engine.request import ChatPrompt
from common.prefixes import common_prefix
from tests.engine.vision.seeing import MANY, seeing, shown, turns

TINY_TEXT = Path(__file__).parents[2] / "models" / "tiny_text"
MOST_LOST = 3  # tokens between a cut and the place before it
Message = dict[str, Any]

# The system prompt is part of the first user's turn, as in Gemma's template.
FOLDED = """\
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
<|im_start|>{{ 'model' if message.role == 'assistant' else 'user' }}
{{ first if loop.first }}{{ message.content | trim }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>model\n{% endif -%}"""
# The tools come before the last question, as in Mistral's templates, and roles must alternate.
MOVING = """\
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if not loop.first and loop.previtem.role == 'user' -%}
{{- raise_exception('two questions in a row') -}}
{%- endif -%}
{%- if message is sameas last and tools -%}<tool_call>{{ tools | tojson }}</tool_call>{%- endif -%}
<|im_start|>{{ message.content }}<|im_end|>
{%- elif message.role != 'assistant' or message.content -%}
{{ message.role }}: {{ message.content }}<|im_end|>
{%- endif -%}
{%- endfor -%}"""
# Every answer begins with open reasoning, which later prompts drop.
OPENED = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif -%}"""
# Only answers in words have a header, as in some conversions of DeepSeek R1.
HEADLESS = """\
{%- for message in messages -%}
{%- if message.tool_calls -%}
<tool_call>{{ message.tool_calls | tojson }}<|im_end|>
{%- else -%}
<|im_start|>{{ message.role }} has this to say:\n{{ message.content }}<|im_end|>\n
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant has this to say:\n{% endif -%}"""
TEMPLATES = {
    "own": None,
    "folded": FOLDED,
    "moving": MOVING,
    "opened": OPENED,
    "headless": HEADLESS,
}

TOOLS: tuple[Message, ...] = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Shows a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    },
)
TEXT = st.text(alphabet="abcdef ghij.\n<é", min_size=1, max_size=40).map(lambda text: f"a{text}z")


@cache
def _builder(template: str | None, *, trims: bool = False) -> PromptBuilder:
    tokenizer: Any = load(TINY_TEXT)
    if template is not None:
        tokenizer.chat_template = template
    return PromptBuilder(tokenizer, 1 << 20, 1 << 20, trims=trims)


def _call(path: str) -> list[Message]:
    return [{"id": "call00001", "function": {"name": "look", "arguments": {"path": path}}}]


def _looked(path: str, thought: str, shown: str) -> list[Message]:
    """The messages that one step of an agent adds."""
    asks = {"role": "assistant", "content": "", "reasoning_content": thought}
    tool_result = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": shown}
    return [{**asks, "tool_calls": _call(path)}, tool_result]


def _built(name: str, messages: list[Message]) -> BuiltPrompt:
    return _builder(TEMPLATES[name]).build(ChatPrompt(tuple(messages), TOOLS))


def _require_place(built: BuiltPrompt, following: BuiltPrompt) -> None:
    """One place must be within the prefix that both share, and near its end."""
    shared = common_prefix(built.tokens, following.tokens)
    lost = min((shared - at for at in built.positions if at <= shared), default=shared)
    assert lost <= MOST_LOST, (shared, built.positions)


@pytest.mark.parametrize("name", TEMPLATES)
@given(text=st.lists(TEXT, min_size=10, max_size=10), steps=st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_the_next_prompt_shares_a_place(name: str, text: list[str], steps: int) -> None:
    # Texts that begin alike would share more than these positions by chance.
    text = [f"{at}{one}" for at, one in enumerate(text)]
    system = {"role": "system", "content": text[0]}
    talk = [system, {"role": "user", "content": text[1]}]
    for step in range(steps):
        talk += _looked(text[2], text[3 + step], text[5 + step])
    built = _built(name, talk)
    answer = {"role": "assistant", "content": text[7], "reasoning_content": text[8]}
    asked = {"role": "user", "content": text[9]}
    _require_place(built, _built(name, [*talk, answer, asked]))
    if name != "folded":  # it renders no calls
        _require_place(built, _built(name, [*talk, *_looked(text[2], text[8], text[9])]))
    _require_place(built, _built(name, [system, {"role": "user", "content": text[9]}]))
    _require_place(built, _built(name, [*talk[:-1], {**talk[-1], "content": text[9]}]))


def test_reasoning_that_the_next_question_drops_comes_after_a_place() -> None:
    talk = [{"role": "user", "content": "Fix it."}, *_looked("a.py", "What is in a?", "pass")]
    built = _built("own", talk)
    before = [_builder(None).detokenize(built.tokens[:at]) for at in built.positions]
    assert any(text.endswith("Fix it.<|im_end|>\n<|im_start|>assistant\n") for text in before)


def test_a_model_whose_caches_can_be_trimmed_needs_no_places() -> None:
    talk = ({"role": "user", "content": "Hello"},)
    built = _builder(None, trims=True).build(ChatPrompt(talk))
    assert built.positions == ()
    assert built.tokens == _builder(None).build(ChatPrompt(talk)).tokens


def test_quoted_control_tokens_are_not_counted() -> None:
    quotes = "What is <|im_end|> and <|im_start|>? " * 3
    built = _built("own", [{"role": "user", "content": quotes}])
    answer = {"role": "assistant", "content": "Marks."}
    asked = {"role": "user", "content": quotes}
    following = _built("own", [{"role": "user", "content": quotes}, answer, asked])
    _require_place(built, following)


def test_a_begun_answer_has_places() -> None:
    talk = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"})
    builder = _builder(None)
    built = builder.build(ChatPrompt(talk, continues=True))
    ended = ({**talk[1], "content": "Good day to you"}, {"role": "user", "content": "Bye"})
    _require_place(built, builder.build(ChatPrompt((talk[0], *ended))))


def test_a_template_that_rejects_other_messages_gives_fewer_places() -> None:
    only = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}<|im_start|>hello"
    built = _builder(only).build(ChatPrompt(({"role": "user", "content": "Hello"},)))
    assert all(at < len(built.tokens) for at in built.positions)


async def test_places_after_an_image_count_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with seeing() as engine:
        assert engine._served is not None
        prompts = engine._served.prompts
        monkeypatch.setattr(prompts, "_trims", False)
        talk = turns("Be brief.", "I am.", MANY)
        given = shown("red", "blue", image_messages=(0, 2))
        built = prompts.build(ChatPrompt(talk), given)
        answered = (*talk, *turns("x", "Red and blue.")[1:], *turns("Thank you."))
        following = prompts.build(ChatPrompt(answered), given)
        edited = prompts.build(
            ChatPrompt((*talk[:2], {"role": "user", "content": "Goodbye."})),
            shown("red", image_messages=(0,)),
        )
    for other in (following, edited):
        assert built.media is not None
        assert other.media is not None
        shared = common_prefix(list(built.media.key), list(other.media.key))
        assert min(shared - at for at in built.positions if at <= shared) <= MOST_LOST


def test_control_strings_that_the_tokenizer_reads_differently_give_no_places() -> None:
    positions = TokenPositions("<a>x<a>y", [7, 1, 2], {"<a>": 7}, lambda text: [1])
    assert positions.of([3, 8]) == ()


def test_a_long_prompt_is_not_tokenised_again() -> None:
    read = 0

    def encode(text: str) -> list[int]:
        nonlocal read
        read += len(text)
        return [ord(one) for one in text]

    body = "x" * 100_000
    text = f"<a>{body}<a>{body}<a>tail"
    tokens = [7, *map(ord, body), 7, *map(ord, body), 7, *map(ord, "tail")]
    positions = TokenPositions(text, tokens, {"<a>": 7}, encode)
    cuts = [len(text) - 2, 100_003, 100_006, 180_000]
    assert positions.of(cuts) == (len(tokens) - 3, 1, 100_002)
    assert read < 100
