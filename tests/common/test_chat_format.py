"""Formats by name and by detection, and the markers that others need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.chat_events import message_of
from common.chat_format import ChatFormat
from common.chat_parser import ChatParser, parse_chat
from common.formats import families
from tests.common.chat_replay import plain
from tests.common.corpus import TOOLS

IMPORTER_TOOLS = """
    hermes qwen3_xml qwen3_coder llama3_json llama4_pythonic pythonic mistral deepseek_v3
    deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 glm45 glm47 gemma4 kimi_k2 kimi_k3 openai
    minimax_m2 granite4 longcat function_gemma olmo3 ernie45 phi4_mini_json
"""
IMPORTER_REASONING = """
    qwen3 deepseek_r1 deepseek_v3 glm45 gemma4 granite minimax_m2 kimi_k2 nemotron_v3 olmo3 ernie45
    openai_gptoss mistral
"""
OTHER_ENGINES_TOOLS = """
    apertus2509 cohere_command3 cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 dots
    functionary gigachat3 gigachat35 glm hunyuan hunyuan_a13b hy_v3 hy_v4 hyperclovax inkling
    internlm interns1 iquest_coder iquest_coder_v2 jamba k2_horizon ling3 mimo minimax_m3 muse
    muse_glimmer nemotron_json openpangu_v2 plamo3 poolside_v1 seed_oss solar_open2 spark25 step3
    step3p5 step5 beam musespark1x spark3 trinity xlam
"""
MLX_LM_TOOLS = """
    function_gemma gemma4 glm47 json_tools kimi_k2 kimi_k3 laguna longcat minicpm5 minimax_m2
    mistral muse_spark pythonic qwen3_coder
"""


TOOL_PARSERS = (*IMPORTER_TOOLS.split(), *MLX_LM_TOOLS.split(), *OTHER_ENGINES_TOOLS.split())


@pytest.mark.parametrize("name", sorted(set(TOOL_PARSERS)))
def test_every_tool_parser_that_hosts_configure(name: str) -> None:
    assert ChatFormat.named(name).name == name
    assert ChatFormat.named(name).tool_call_markers


@pytest.mark.parametrize("name", IMPORTER_REASONING.split())
def test_every_reasoning_parser_that_hosts_configure(name: str) -> None:
    assert ChatFormat.named("hermes", name).thinks
    assert ChatFormat.named(None, name).thinks


def test_names_are_matched_as_people_type_them() -> None:
    assert ChatFormat.named(" Qwen3-Coder ").grammar is ChatFormat.named("qwen3_coder").grammar


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(("hermez", None), "did you mean 'hermes'"), (("hermes", "qwen"), "did you mean 'qwen3'")],
)
def test_an_unknown_name_suggests_the_nearest(names: tuple[str, str | None], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ChatFormat.named(*names)


def test_without_names_all_text_is_the_answer() -> None:
    text = "<think>a</think><tool_call>{}</tool_call>"
    assert parse_chat(text, ChatFormat.named(None), tools=TOOLS).content == text


def test_a_named_reasoning_parser_adds_its_tags() -> None:
    format_ = ChatFormat.named("hermes", "mistral")
    assert format_.reasoning_markers == ("[THINK]", "[/THINK]")
    assert parse_chat("[THINK]a[/THINK]b", format_).reasoning_content == "a"


def test_markers() -> None:
    assert ChatFormat.named("hermes").tool_call_markers == ("<tool_call>", "</tool_call>")
    assert ChatFormat.named("hermes").reasoning_markers == ("<think>", "</think>")
    assert ChatFormat.named("kimi_k2").tool_call_markers == (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    )
    assert ChatFormat.named("plain").tool_call_markers is None
    assert ChatFormat.named("plain").reasoning_markers is None


TEMPLATES = {
    "hermes": "{{ '<tool_call>\\n' }}{{ '\\n</tool_call>' }}{{ '<think>\\n' }}",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=p>\n</parameter></function>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n```json'",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
    "deepseek_v32": "<｜DSML｜function_calls>\n<｜DSML｜invoke name=",
    "deepseek_v4": "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=",
    "deepseek_v41": "<｜DSML｜ calls>\n<｜DSML｜ invoke name=",
    "gemma4": "<|tool_call>call:' + name + '{' <tool_call|> <|channel>thought",
    "function_gemma": "<start_function_call>call:",
    "openai": "<|start|>assistant<|channel|>analysis<|message|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "kimi_k3": "<|open|>message role=\"assistant\"<|sep|>",
    "minimax_m2": "<minimax:tool_call>\n<invoke name=",
    "minimax_m3": "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=",
    "muse_glimmer": "<|start|>assistant to=' + name + '<|message|><atem:function_calls>' <|eom|>",
    "muse_spark": "<atem:function_calls>\n<atem:invoke name=",
    "mistral": "[TOOL_CALLS]' + name + '[ARGS]",
    "llama3_json": "{{ '<|python_tag|>' }} {\"name\": function name, \"parameters\": ...}",
    "llama4_pythonic": "<|header_start|>assistant<|header_end|> <|python_start|>",
    "lfm2": "<|tool_call_start|>[' + calls + ']<|tool_call_end|>",
    "longcat": "<longcat_tool_call>{function-name}",
    "minicpm5": '<function name="function-name"><param name="param-name">',
    "phi4_mini_json": "<|tool|>' + tools + '<|/tool|> <|tool_call|> <|/tool_call|>",
    "granite": "<|tool_call|>' + calls",
    "cohere": "<|START_ACTION|>[' + calls + ']<|END_ACTION|>",
    "apertus": "<|tools_prefix|>[{\"' + name + '\": ' + arguments + '}]<|tools_suffix|>",
    "hunyuan_a13b": "{% if '<answer>' in content and '</answer>' in content %} <tool_calls>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>' + id + '<|tool_call:name|>",
    "apriel": "answer after [BEGIN FINAL RESPONSE] <tool_calls>[' + calls + ']</tool_calls>",
    "gigachat35": "<｜GCML｜tool_calls>\n<｜GCML｜invoke name=",
    "step3": "<｜tool_sep｜><steptml:invoke name=",
    "hy_v3": "<tool_call:opensource>' + name + '<tool_sep:opensource>",
    "hy_v4": "<tool_call:opensource>' + name + '<arg_key:opensource>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>' + name + '<ifm|arg_key>",
    "iquest_coder_v2": "<iquestcoder_tool_call>' + name + '\n<arg_key>",
    "solar_open2": "<|tool_call:start|>' + name + '\n<|tool_arg:start|>",
    "plamo3": "<|plamo:begin_tool_requests:plamo|>",
    "inkling": "<|message_model|>' + name + '<|content_invoke_tool_json|>",
    "gigachat3": "<|message_sep|>\n\nfunction call<|role_sep|>\n",
    "internlm": "<|action_start|><|plugin|>",
    "dots": "<dots_function_call>\n<invoke name=",
    "pangu": "[unused11]' + calls + '[unused12]",
    "command_r": "<|CHATBOT_TOKEN|> Write 'Action:' and a list, or 'Grounded answer:'",
    "granite_20b_fc": "<function_call> {{ call | tojson }}",
    "hyperclovax": "<|im_start|>assistant -> tool/function_call\n",
    "functionary": "assistant<|end_header_id|>\n\n' }}{{ '>>>all\n' + content",
    "jamba": "<tool_calls>[' + calls + ']</tool_calls>",
    "nemotron_json": "<think>\n\n <TOOLCALL>[' + calls + ']</TOOLCALL>",
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_detects_a_family_by_its_template(name: str) -> None:
    assert ChatFormat.detect(TEMPLATES[name], ()).name == name


def test_the_template_outweighs_the_vocabulary() -> None:
    llama = {"<|python_tag|>", "<|eom_id|>", "<|start_header_id|>"}
    assert ChatFormat.detect(TEMPLATES["hermes"], llama).name == "hermes"
    assert ChatFormat.detect("{{ messages }}", llama).name == "llama3_json"
    assert ChatFormat.detect(None, llama).name == "llama3_json"
    assert ChatFormat.detect(None, ()).name == "plain"


def test_reasoning_is_detected_without_tools() -> None:
    format_ = ChatFormat.detect("{{ '<think>\\n' }}</think>", {"<think>": 1, "</think>": 2})
    assert plain(parse_chat("<think>a</think>b", format_, tools=TOOLS)) == ("b", "a", [])


def test_prose_about_thinking_in_a_template_is_not_reasoning() -> None:
    assert not ChatFormat.detect("{# a template that will <think> of nothing #}", ()).thinks


def test_every_name_has_a_grammar_that_accepts_plain_text() -> None:
    for name in families.BY_NAME:
        assert parse_chat("Nine.", ChatFormat.named(name), tools=TOOLS).content == "Nine."


def test_templates_of_the_test_models_are_detected() -> None:
    """All are of the Qwen family, whatever their templates look like."""
    found = sorted(Path(__file__).parents[1].glob("models/**/chat_template.jinja"))
    for path in found:
        assert ChatFormat.detect(path.read_text(encoding="utf-8"), ()).name == "hermes", path


@pytest.mark.parametrize("tools", [[], [{"function": {"name": "look"}}]], ids=["none", "one"])
def test_newlines_are_sent_at_once_if_no_call_can_follow(tools: list[Any]) -> None:
    parser = ChatParser(ChatFormat.named("hermes", "qwen3"), tools=tools)
    sent = [message_of(parser.feed(text)).content for text in ("<think>", "\n", "</think>", "\n")]
    assert sent == ["", "", "", ""]
    sent = [message_of(parser.feed(text)).content for text in ("One", "\n", "\n", "Two")]
    assert sent == (["One", "", "", "\n\nTwo"] if tools else ["One", "\n", "\n", "Two"])


def test_newlines_in_a_code_block_are_sent_at_once() -> None:
    """No call can follow there, but one can behind the block."""
    parser = ChatParser(ChatFormat.named("hermes"), tools=[{"function": {"name": "look"}}])
    pieces = ("So:\n", "```py", "\n", "a = 1", "\n\n", "```\n", "Two")
    sent = [message_of(parser.feed(text)).content for text in pieces]
    assert sent == ["So:", "\n```py", "\n", "a = 1", "\n\n", "```", "\nTwo"]
