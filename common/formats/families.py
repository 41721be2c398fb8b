"""The families: names, signs, reasoning, and how each writes calls, in one literal for each.

A family is recognised by the markers in a chat template, or by the tokens in a vocabulary. The
template is examined first: a fine-tuned model keeps the vocabulary of its base model, but the
template shows what it was trained on. Of the families whose signs are all present, the one with the
longest signs is the most specific.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from common.formats import addressed, gemma, qwen
from common.formats.cursor import Wait
from common.formats.family import THINK, Family
from common.formats.foreign import foreign_calls
from common.formats.harmony import Harmony
from common.formats.json_calls import read_bare_calls, read_code_blocks
from common.formats.minimax_m3 import MARK
from common.formats.pythonic import NAME
from common.formats.reading import CallSyntax, Reading, Tags, begins_line, no_content_yet
from common.formats.sections import Section
from common.formats.shapes import (
    UNMARKED,
    FencedShape,
    JsonShape,
    PythonShape,
    TagShape,
    invoked,
    json_block,
    key_value,
    python_block,
    tagged,
)
from common.formats.tagged_text import TaggedText

_OBJECT = '{"name": {name}, "arguments": {arguments}}'
_PARAMETERS = '{"name": {name}, "parameters": {arguments}}'
_RESPONSE = ("<response>", "</response>")
_CITATIONS = ("<co>", "<co: ", "</co>", "</co: ")
_GLM_EXTRAS: Mapping[str, Any] = {
    "silent": ("<|role_end|>",),
    "inline": ("<|begin_of_box|>", "<|end_of_box|>"),
    "starts_line": True,
}
_V31 = JsonShape(
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "",
    "<｜tool▁calls▁end｜>",
)
_V3 = replace(
    _V31,
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    "<｜tool▁call▁end｜>",
)
# Smaller models that were trained on DeepSeek's answers spell the markers in other ways, which
# llama.cpp reads as well (deepseek_r1 in its common/chat).
_V3_CALLS = (
    replace(_V3.section, openers=(_V3.opening, "<｜tool▁calls｜>"))
    .spelt(*({"▁": gap, "｜": bar} for bar in "｜|" for gap in ("▁", "_", r"\_", " ")))
    .syntax,
)
_DSML = tuple(
    invoked(prefix, block, flags=("true", "false"))
    for prefix, block in (
        ("｜DSML｜", "function_calls"),
        ("｜DSML｜", "tool_calls"),
        ("｜DSML｜ ", "calls"),
    )
)
# What models write instead, of which vLLM reads the names without underscores.
_BARS = ("｜DSML|", "|DSML｜", "DSML｜", "｜DSML", "DSML|", "|DSML", "|DSML|")
_PREFIXES = (*_BARS, "｜DSML｜", "｜DSML｜ ", "｜｜DSML｜｜", "｜｜DSML｜｜ ", "||DSML||", "‖DSML‖")
_DSML_CALLS = (
    *(tagged(shape.tags) for shape in _DSML),
    *(
        CallSyntax(tags.openers, tags.read, begins=begins_line, broken=True)
        for prefix in _PREFIXES
        for block in ("function_calls", "tool_calls", "calls", "toolcalls", "tool")
        for tags in [invoked(prefix, block, flags=("true", "false")).tags]
    ),
    *_V3_CALLS,
)
_DEEPSEEK_INLINE = tuple(
    f"<｜tool▁{word}▁{end}｜>" for word in ("outputs", "output") for end in ("begin", "end")
)
_MINIMAX = invoked("", "minimax:tool_call", lines="paired")
_MINIMAX_CALLS = (
    *_MINIMAX.syntaxes,
    CallSyntax(("<minimax:toolcall>",), _MINIMAX.tags.read, ("</minimax:toolcall>",), begins_line),
)
_TOOL_CALLS = "[TOOL_CALLS]"
_BROKEN_TOOL_CALLS = ("[TOOL_CALLS", "TOOL_CALLS]", "TOOL_CALLS", "[TOOL_CALL]")
_ARGS = ("[ARGS]", "[ARGS", "ARGS]", "[args]", "[ARGUMENTS]", "=")
"""The marker before the arguments, and what models write instead."""
_MISTRAL = Section((), (), (_TOOL_CALLS, *_BROKEN_TOOL_CALLS, f"{_TOOL_CALLS}:"), (), between=_ARGS)


def _begins_line_or_answer(reading: Reading, opener: str) -> bool:
    return no_content_yet(reading, opener) or begins_line(reading, opener)


def _read_without_opening(reading: Reading) -> Wait[None]:
    """Read a call whose first token is missing; `[ARGS]` still identifies it."""
    if not (yield from reading.follow(NAME, (_ARGS[0], "[CALL_ID]"))):
        raise reading.unreadable()
    yield from _MISTRAL.read_named(reading)


_MISTRAL_CALLS = (
    CallSyntax((_TOOL_CALLS,), _MISTRAL.read),
    CallSyntax(_BROKEN_TOOL_CALLS, _MISTRAL.read, begins=begins_line, broken=True),
    CallSyntax(("[", "{"), read_bare_calls, begins=no_content_yet),
    CallSyntax((), _read_without_opening, begins=_begins_line_or_answer, by_name=True),
)
_XLAM_CALLS = (
    qwen.MARKED_CALLS,
    _MISTRAL_CALLS[0],
    CallSyntax(("```",), read_code_blocks, begins=begins_line),
    CallSyntax(("[", "{"), read_bare_calls, begins=begins_line),
)
_FUNCTION_GEMMA = FencedShape("<start_function_call>", "<escape>", "<end_function_call>")
_LLAMA_CALLS = (
    replace(python_block("<|python_tag|>", offered=True), closers=("<|python_end|>",)),
    python_block("<|python_start|>", "<|python_end|>"),
    UNMARKED,
)
_STEP = invoked(
    "steptml:",
    "",
    call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
    call_end="</steptml:invoke><｜tool_call_end｜>",
    forbidden=("<steptml:", "</steptml:", "<｜tool_"),
    opening="<｜tool_calls_begin｜>",
    closing="<｜tool_calls_end｜>",
)
_STEP_SECTION = Section(
    (_STEP.opening,),
    (_STEP.closing,),
    ("<｜tool_call_begin｜>",),
    ("<｜tool_call_end｜>",),
    tags=invoked("steptml:", "", opening="", closing="<｜tool_call_end｜>").tags,
)
_GLM, _LONGCAT = key_value(undeclared="guess"), key_value("longcat_", undeclared="guess")
_IQUEST = key_value(call="<iquestcoder_tool_call>{name}\n", call_end="</iquestcoder_tool_call>")
_HY_BLOCK: Mapping[str, Any] = {
    "opening": "<tool_calls:opensource>\n",
    "closing": "\n</tool_calls:opensource>",
}
_HY_V3 = key_value("", ":opensource", "<tool_sep:opensource>", **_HY_BLOCK)
_HY_CALLS = (
    tagged(_HY_V3.tags),
    tagged(key_value("", "", "<tool_sep>", opening="<tool_calls>", closing="</tool_calls>").tags),
)
_HY_THINK = (Tags("<think:opensource>", "</think:opensource>", anywhere=True), THINK)
_HORIZON_THINK = tuple(
    Tags(f"<ifm|{name}>", f"</ifm|{name}>", anywhere=True)
    for name in ("think", "think_fast", "think_faster")
)
_K2 = JsonShape(
    "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "",
    "<|tool_calls_section_end|>",
)
_K2_CALLS = replace(
    _K2.section,  # vLLM accepts both spellings too
    openers=(_K2.opening, "<|tool_call_section_begin|>"),
    closers=(_K2.closing, "<|tool_call_section_end|>"),
).syntax
_MUSE_THINK = Tags("<|think:start|>", "<|think:end|>", anywhere=True)
_GRANITE_THINK = (
    Tags("Here is my thought process:", "Here is my response:"),
    Tags("Here's my thought process:", "Here's my response:"),
    THINK,
)
_CLOVA_TURN = "<|im_end|>\n<|im_start|>assistant"
_GLIMMER_TURN, _TO_USER = "<|start|>assistant", " to=user<|message|>"

# The formatter would give each field of a family its own line.
# fmt: off
FAMILIES = (
    Family("plain", "plain none", reasoning="none", tags=()),
    Family(
        "Qwen3, Hermes, Granite 4",
        "hermes qwen qwen2 qwen25 qwen3 qwen3_json json_tools granite4 trinity",
        JsonShape(f"<tool_call>\n{_OBJECT}\n</tool_call>", separator="\n"),
        signs=[("<tool_call>",)],
        reasoning="qwen3 qwen3_thinking think holo2 granite_thinking_parser", calls=qwen.CALLS,
    ),
    Family(
        "Qwen3-Coder, Qwen3.5 and later",
        "qwen3_coder qwen3_xml qwen3_5 nemotron_v3 step3p5 step5 mimo iquest_coder", qwen.SHAPE,
        signs=[("<tool_call>", "<function=")],
        reasoning="nemotron_v3 nemotron_3 step5 mimo iquest_coder", calls=qwen.CALLS,
    ),
    Family("Step 3.5", reasoning="step3p5", tags=(replace(THINK, anywhere=True),)),
    Family(
        "Functionary 3.1", "functionary_v3_1",
        JsonShape("<function={name}>{arguments}</function>", separator=""), calls=qwen.CALLS,
    ),
    Family(
        "ERNIE 4.5", "ernie45", JsonShape(f"<tool_call>\n{_OBJECT}\n</tool_call>", separator="\n"),
        reasoning="ernie45", calls=qwen.CALLS, silent=_RESPONSE,
    ),
    Family(
        "DeepSeek V3", "deepseek_v3 deepseek_r1 deepseekv3", _V3,
        signs=[("<｜tool▁calls▁begin｜>", "```json")], reasoning="deepseek_r1 deepseek_v3",
        calls=_V3_CALLS, inline=_DEEPSEEK_INLINE,
    ),
    Family(
        "DeepSeek V3.1", "deepseek_v31 deepseekv31", _V31, signs=[("<｜tool▁calls▁begin｜>",)],
        reasoning="deepseek_v31", calls=_V3_CALLS, inline=_DEEPSEEK_INLINE,
    ),
    Family(
        "DeepSeek V3.2", "deepseek_v32 deepseekv32", _DSML[0],
        signs=[("｜DSML｜",), ("｜DSML｜", "<｜tool▁calls▁begin｜>", "```json")],
        reasoning="deepseek_v32", calls=_DSML_CALLS, inline=_DEEPSEEK_INLINE,
    ),
    Family(
        "DeepSeek V4", "deepseek_v4 deepseekv4", _DSML[1], signs=[("｜DSML｜tool_calls",)],
        reasoning="deepseek_v4", calls=_DSML_CALLS, inline=_DEEPSEEK_INLINE,
    ),
    Family(
        "DeepSeek V4.1", "deepseek_v41 deepseekv41", _DSML[2], signs=[("｜DSML｜ calls",)],
        reasoning="deepseek_v41", calls=_DSML_CALLS, inline=_DEEPSEEK_INLINE,
    ),
    Family(
        "GigaChat 3.5", "gigachat35", invoked("｜GCML｜", "tool_calls", flags=("true", "false")),
        signs=[("｜GCML｜",)], reasoning="gigachat35",
    ),
    Family(
        "Step 3", "step3", _STEP, signs=[("<steptml:invoke",)], reasoning="step3",
        calls=(_STEP_SECTION.syntax,),
    ),
    Family(
        "GLM 4.5, 4.7, 5, Laguna, Ling 3, Spark 2.5 and 3",
        "glm45 glm47 glm5 glm laguna poolside_v1 ling3 spark25 spark3", _GLM,
        signs=[("<arg_key>",), ("<arg_key>", "<tool_call>")],
        reasoning="glm45 glm47 glm5 poolside_v1 laguna ling3", **_GLM_EXTRAS,
    ),
    Family(
        "Longcat", "longcat longcat_flash", _LONGCAT, signs=[("<longcat_tool_call>",)],
        tags=(Tags("<longcat_think>", "</longcat_think>"),), reasoning="longcat", **_GLM_EXTRAS,
    ),
    Family(
        "iQuest Coder 2", "iquest_coder_v2", _IQUEST, signs=[("<iquestcoder_tool_call>",)],
        reasoning="iquest_coder_v2", **_GLM_EXTRAS,
    ),
    Family(
        "Hunyuan 3", "hy_v3 hy3", _HY_V3,
        signs=[("<tool_sep:opensource>",), ("<tool_sep:opensource>", "<tool_call:opensource>")],
        tags=_HY_THINK, reasoning="hy_v3", calls=_HY_CALLS,
    ),
    Family(
        "Hunyuan 4", "hy_v4", key_value("", ":opensource", **_HY_BLOCK),
        signs=[("<tool_call:opensource>",)], tags=_HY_THINK, reasoning="hy_v4", calls=_HY_CALLS,
    ),
    Family(
        "K2 Horizon", "k2_horizon k2_v3",
        key_value(
            "ifm|", opening="<ifm|tool_calls>", closing="</ifm|tool_calls>",
            others={"kind": ("<ifm|arg_type>", "</ifm|arg_type>")},
        ),
        signs=[("<ifm|tool_call",)], tags=_HORIZON_THINK, reasoning="k2_horizon",
    ),
    Family(
        "Solar Open 2", "solar_open2",
        TagShape(
            call="<|tool_call:start|>{name}\n",
            parameter="<|tool_arg:start|>{key}<|tool_arg:value|>", value_end="<|tool_arg:end|>\n",
            call_end="<|tool_call:end|>", separator="\n", forbidden=("<|tool_call:", "<|tool_arg:"),
        ),
        signs=[("<|tool_arg:start|>",)], tags=(_MUSE_THINK,), reasoning="solar_open2",
    ),
    Family(
        "Gemma 4", "gemma4", FencedShape("<|tool_call>", '<|"|>', "<tool_call|>"),
        signs=[("<|tool_call>",)],
        tags=(
            Tags("<|channel>thought", "<channel|>", anywhere=True),
            Tags("thought\n", "<channel|>"),  # if the server omits special tokens
        ),
        reasoning="gemma4", calls=gemma.GEMMA4_CALLS,
        late_tags=(Tags("<|channel>", "<channel|>", anywhere=True),),  # a channel without a name
        answers=("<|channel>content\n", "<|channel>response\n", "<|channel>final\n"),
        silent=("<|tool_response>", "<turn|>"),
    ),
    Family(
        "FunctionGemma", "function_gemma functiongemma", _FUNCTION_GEMMA,
        signs=[("<start_function_call>",)], tags=(),
        silent=("<start_function_response>", "<end_of_turn>"),
    ),
    Family(
        "gpt-oss, Beam", "openai openai_gptoss gpt_oss gptoss harmony beam",
        JsonShape(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
            several=False,  # the token that ends a call ends the answer
        ),
        signs=[("<|channel|>", "<|message|>")],
        reasoning="openai_gptoss openai gpt_oss harmony beam", text=Harmony(),
    ),
    Family(
        "Kimi K2", "kimi_k2 kimi", _K2, signs=[("<|tool_calls_section_begin|>",)],
        reasoning="kimi_k2", calls=(_K2_CALLS,),
    ),
    Family("Kimi VL", reasoning="kimi", tags=(Tags("◁think▷", "◁/think▷"),)),
    Family(
        "Kimi K3", "kimi_k3",
        TagShape(
            opening="<|open|>tools<|sep|>", call='<|open|>call tool="{name}"<|sep|>',
            parameter='<|open|>argument key="{key}" type="{flag}"<|sep|>',
            value_end="<|close|>argument<|sep|>", call_end="<|close|>call<|sep|>",
            closing="<|close|>tools<|sep|>", flags=("string", "object"),
            forbidden=("<|open|>", "<|close|>", "<|sep|>"),
            others={"json_block": "<|open|>json", "json_close": "<|close|>json<|sep|>"},
        ),
        signs=[("<|open|>", "<|sep|>")],
        tags=(Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>", anywhere=True),),
        reasoning="kimi_k3", answers=("<|open|>response<|sep|>",),
        silent=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        tight=(("<|open|>", "<|sep|>"), ("<|close|>", "<|sep|>")),
    ),
    Family(
        "Llama 3", "llama3_json llama4_json llama3", JsonShape(_PARAMETERS, separator="; "),
        signs=[("<|python_tag|>",), ("<|eot_id|>", '"parameters"')], calls=_LLAMA_CALLS,
    ),
    Family(
        "Llama 4", "llama4_pythonic llama4 pythonic", PythonShape("[", ", ", "]"),
        signs=[("<|python_start|>",), ("<|header_start|>",)], calls=_LLAMA_CALLS,
    ),
    Family(
        "LFM2, MiniCPM 3 and 4", "lfm2 minicpm minicpm3 minicpm4",
        PythonShape("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        signs=[("<|tool_call_start|>",)],
        tags=(THINK, Tags("<|thought_start|>", "<|thought_end|>")),
    ),
    Family(
        "OLMo 3", "olmo3", PythonShape("<function_calls>", "\n", "</function_calls>"),
        signs=[("<function_calls>",)], reasoning="olmo3",
    ),
    Family(
        "Mistral", "mistral", JsonShape(_OBJECT, "[TOOL_CALLS][", ", ", "]"),
        signs=[("[TOOL_CALLS]",)], tags=(Tags("[THINK]", "[/THINK]", anywhere=True), THINK),
        reasoning="mistral", calls=_MISTRAL_CALLS, silent=("[/TOOL_CALLS]",),
        by_token=("[ARGS]", JsonShape("[TOOL_CALLS]{name}[ARGS]{arguments}", separator="")),
    ),
    Family(
        "MiniMax M2", "minimax_m2 minimax", _MINIMAX, signs=[("<minimax:tool_call>",)],
        tags=(replace(THINK, anywhere=True),), reasoning="minimax_m2 minimax", calls=_MINIMAX_CALLS,
    ),
    Family("MiniMax M2, kept in the text", reasoning="minimax_m2_append_think"),
    Family(
        "MiniMax M3", "minimax_m3",
        TagShape(
            opening=f"{MARK}<tool_call>\n", call=f'{MARK}<invoke name="{{name}}">',
            parameter=f"{MARK}<{{key}}>", value_end=f"{MARK}</{{key}}>",
            call_end=f"{MARK}</invoke>\n", closing=f"{MARK}</tool_call>", forbidden=(MARK,),
        ),
        signs=[(MARK,)], tags=(Tags("<mm:think>", "</mm:think>", anywhere=True),),
        reasoning="minimax_m3", tight=((MARK, ">"),),
    ),
    Family(
        "dots", "dots", invoked("", "dots_function_call", lines="paired"),
        signs=[("<dots_function_call>",)],
    ),
    Family(
        "Muse Spark", "muse_spark", addressed.MUSE, signs=[("<atem:function_calls>",)],
        tags=(_MUSE_THINK,), reasoning="muse_spark",
    ),
    Family(
        "Muse Glimmer", "muse_glimmer muse musespark1x",
        replace(
            addressed.MUSE,
            call=f" to={{name}}<|message|>{addressed.MUSE.opening}{addressed.MUSE.call}",
            call_end=f"{addressed.MUSE.call_end}{addressed.MUSE.closing}", opening="",
            separator=f"<|eom|>{_GLIMMER_TURN}", closing="", forbidden=addressed.MUSE.markup,
        ),
        signs=[("<atem:function_calls>", "<|eom|>", "<|message|>")],
        tags=(Tags(" to=self<|message|>", f"<|eom|>{_GLIMMER_TURN}", anywhere=True),),
        reasoning="muse_glimmer muse musespark1x", calls=addressed.GLIMMER_CALLS,
        answers=(_TO_USER, f"{_GLIMMER_TURN}{_TO_USER}"),
        silent=("<|eom|>", _GLIMMER_TURN, "<|message|>", "<|eot|>"),
    ),
    Family(
        "MiniCPM 5", "minicpm5 minicpm4_xml",
        TagShape(
            call='<function name="{name}">', parameter='<param name="{key}">', value_end="</param>",
            call_end="</function>", separator="\n", lines="paired",
            forbidden=("<function", "</function", "<param", "</param", "<![CDATA["),
            others={"cdata": True},
        ),
        signs=[("<function name=",)], reasoning="minicpm5 minicpmv",
    ),
    Family(
        "Seed-OSS", "seed_oss",
        TagShape(
            opening="<seed:tool_call>\n", call="<function={name}>\n", parameter="<parameter={key}>",
            value_end="</parameter>\n", call_end="</function>\n", closing="</seed:tool_call>",
            separator="\n", each=True, lines="paired",
        ),
        signs=[("<seed:tool_call>",)], tags=(Tags("<seed:think>", "</seed:think>"),),
        reasoning="seed_oss",
    ),
    Family(
        "Granite 3", "granite granite3", JsonShape(_OBJECT, "<|tool_call|>[", closing="]"),
        signs=[("<|tool_call|>",)], tags=_GRANITE_THINK, reasoning="granite",
        calls=(qwen.MARKED_CALLS, json_block("<|tool_call|>")), silent=_RESPONSE,
    ),
    Family(
        "Granite 20B", "granite_20b_fc", JsonShape(f"<function_call> {_OBJECT}", separator="\n"),
        signs=[("<function_call>",)], tags=_GRANITE_THINK,
        calls=(json_block("<function_call>", "</function_call>"),),
    ),
    Family(
        "Phi-4", "phi4_mini_json phi4",
        JsonShape(_OBJECT, "<|tool_call|>[", closing="]<|/tool_call|>"),
        signs=[("<|/tool_call|>",), ("<|/tool_call|>", "<|tool_call|>")], reasoning="phi4",
        calls=(
            json_block("<|tool_call|>", "<|/tool_call|>"),
            json_block("<|tool_calls|>", "<|/tool_calls|>"),
            *(json_block(f"functools{bracket}") for bracket in ("[", " [", "{")),
        ),
    ),
    Family(
        "FireFunction 2", "firefunction firefunction_v2",
        JsonShape(_OBJECT, "functools[", closing="]"),
        signs=[(" functools[",), (" functools[", "<|end_header_id|>")],
    ),
    Family(
        "Cohere's Command R7B, Command A and later", "cohere cohere_command3 cohere_command4",
        JsonShape(
            '{"tool_call_id": "{index}", "tool_name": {name}, "parameters": {arguments}}',
            "<|START_ACTION|>[", closing="]<|END_ACTION|>",
        ),
        signs=[("<|START_ACTION|>",)],
        tags=(Tags("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),),
        reasoning="cohere cohere_command3 cohere_command4",
        answers=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        silent=("<|END_RESPONSE|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"), inline=_CITATIONS,
    ),
    Family(
        "Command R and R+", "command_r command_r_plus",
        JsonShape(
            '{"tool_name": {name}, "parameters": {arguments}}', "Action: ```json\n[", ",\n",
            "]\n```",
        ),
        signs=[("Action:", "<|CHATBOT_TOKEN|>", "Grounded answer:")], tags=(),
        calls=(json_block("Action:", begins=begins_line),),
        silent=("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"), inline=_CITATIONS,
    ),
    Family(
        "Solar Open", "solar_open",
        JsonShape(
            "<|tool_call:begin|>{index}<|tool_call:name|>{name}<|tool_call:args|>{arguments}"
            "<|tool_call:end|>",
            "<|tool_calls|>", "", "<|calls|>",
        ),
        signs=[("<|tool_call:begin|>",)], tags=(Tags("<|think|>", "<|end|>", anywhere=True),),
        reasoning="solar_open", answers=("<|content|>",),
        silent=("<|begin|>assistant", "<|flush|>"),
    ),
    Family(
        "PLaMo 3", "plamo3",
        JsonShape(
            "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}"
            "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
            "<|plamo:constrain|>json<|plamo:msg|>{arguments}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
            "<|plamo:begin_tool_requests:plamo|>", "", "<|plamo:end_tool_requests:plamo|>",
        ),
        signs=[("<|plamo:begin_tool_request",)],
        tags=(Tags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", anywhere=True),),
        reasoning="plamo3", silent=("<|plamo:msg|>", "<|plamo:tag|>"),
    ),
    Family(
        "Apertus", "apertus apertus2509",
        JsonShape("{{name}: {arguments}}", "<|tools_prefix|>[", closing="]<|tools_suffix|>"),
        signs=[("<|tools_prefix|>",)],
        tags=(Tags("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),), reasoning="apertus",
    ),
    Family(
        "Nemotron Nano 2, Llama Nemotron", "nemotron_json nemotron_nano_v2",
        JsonShape(_OBJECT, "<TOOLCALL>[", closing="]</TOOLCALL>"), signs=[("<TOOLCALL>",)],
    ),
    Family(
        "Jamba", "jamba", JsonShape(_OBJECT, "<tool_calls>[", closing="]</tool_calls>"),
        signs=[("<tool_calls>",)],
    ),
    Family(
        "Hunyuan", "hunyuan_a13b hunyuan",
        JsonShape(_OBJECT, "<tool_calls>[", closing="]</tool_calls>"),
        signs=[("<answer>", "</answer>")], reasoning="hunyuan_a13b", answers=("<answer>",),
        silent=("</answer>",),
    ),
    Family(
        "Apriel 1.5, 1.6", "apriel", JsonShape(_OBJECT, "<tool_calls>[", closing="]</tool_calls>"),
        signs=[("[BEGIN FINAL RESPONSE]",)],
        tags=(
            Tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
            Tags("<thinking>", "</thinking>"),
        ),
        reasoning="apriel", silent=("[END FINAL RESPONSE]",),
    ),
    Family(
        "GigaChat 3 and 3.1", "gigachat3", JsonShape(f"<|function_call|>{_OBJECT}", several=False),
        signs=[("function call<|role_sep|>",), ("<|function_call|>", "<|role_sep|>")],
        calls=(
            json_block("<|function_call|>"),
            json_block("<|message_sep|>\n\nfunction call<|role_sep|>"),
            json_block("function call<|role_sep|>"),
        ),
        silent=("<|message_sep|>",),
    ),
    Family(
        "HyperCLOVA X Think", "hyperclovax hyperclovax_seed_think_14b",
        JsonShape(_OBJECT, " -> tool/function_call\n[", closing="]"),
        signs=[("-> tool/function_call",)], tags=(Tags("/think\n", _CLOVA_TURN),),
        reasoning="hyperclovax hyperclovax_seed_think_14b",
        calls=(json_block(" -> tool/function_call", "<|im_end|>"),), silent=(_CLOVA_TURN,),
        starts_line=True,
    ),
    Family("Sarashina", "sarashina", JsonShape(_OBJECT, "<|tool_calls|>[", closing="]")),
    Family(
        "openPangu", "pangu openpangu openpangu_v2",
        JsonShape(_OBJECT, "[unused11][", closing="][unused12]"),
        signs=[("[unused11]", "[unused12]")],
        tags=(THINK, Tags("[unused16]", "[unused17]", anywhere=True)), reasoning="pangu",
    ),
    Family(
        "Inkling", "inkling",
        JsonShape(
            '<|content_invoke_tool_json|>{"name": {name}, "args": {arguments}}<|end_message|>',
            separator="",
        ),
        signs=[("<|content_invoke_tool_json|>",)],
        tags=(Tags("<|content_thinking|>", "<|end_message|>", anywhere=True),), reasoning="inkling",
        calls=addressed.INKLING_CALLS, silent=addressed.INKLING_SILENT,
    ),
    Family(
        "InternLM 2 and 3, Intern-S1", "internlm internlm2 internlm3 interns1 intern_s1",
        JsonShape(f"<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", several=False),
        signs=[("<|action_start|>", "<|plugin|>")], reasoning="interns1",
        calls=tuple(
            json_block(f"<|action_start|>{plugin}", "<|action_end|>")
            for plugin in ("<|plugin|>", " <|plugin|>", "\n<|plugin|>", "")
        ),
    ),
    Family(
        "Functionary 3.2", "functionary functionary_v3 functionary_v3_2",
        JsonShape("{name}\n{arguments}", separator="\n>>>"),  # the prompt already ends with >>>
        signs=[
            (">>>all\n",), ("'>>>all",), (">>>all\n", "<|end_header_id|>"),
            ("'>>>all", "<|end_header_id|>"),
        ],
        text=addressed.Addressed(calls=addressed.FUNCTIONARY_CALLS, silent=(">>>all\n",)),
    ),
    Family("xLAM", "xlam", JsonShape(_OBJECT, "[", closing="]"), calls=_XLAM_CALLS),
)
# fmt: on
_MARKED = tuple(
    dict.fromkeys(
        syntax
        for family in FAMILIES
        for syntax in family.grammar.calls
        if syntax.marked and all(opener[0] in "<[" for opener in syntax.openers)
    )
)


def lenient(family: Family) -> TaggedText:
    """Return the parser, which also reads the calls of other families if this one has any."""
    grammar = family.grammar
    if not grammar.calls:
        return grammar
    return replace(grammar, foreign=foreign_calls(grammar.calls, _MARKED, family.shape))


BY_NAME: Mapping[str, Family] = {
    name: family for family in FAMILIES for name in family.names.split()
}
"""The family for each value of `tool_parser:`."""
REASONING: Mapping[str, tuple[Tags, ...]] = {
    name: () if isinstance(family.grammar, Harmony) else family.grammar.tags
    for family in FAMILIES
    for name in family.reasoning.split()
}
"""The tags for each value of `reasoning_parser:`."""
HARMONY_REASONING = frozenset(
    name
    for family in FAMILIES
    if isinstance(family.grammar, Harmony)
    for name in family.reasoning.split()
)


@cache
def grammar_of(name: str) -> TaggedText:
    """Return the grammar for a value of `tool_parser:`. Raises KeyError if there is none."""
    return lenient(BY_NAME[name])


_SIGNS = sorted(
    ((signs, family.names.split()[0]) for family in FAMILIES for signs in family.signs),
    key=lambda each: -sum(map(len, each[0])),
)
_MARKUP = re.compile(r"[<\[][^\n]*[>\]]")
_TAGS: dict[tuple[str, str], Tags] = {}
for _family in FAMILIES:
    for _tags in _family.tags:
        if _MARKUP.fullmatch(_tags.closing) and not isinstance(_family.grammar, Harmony):
            _TAGS.setdefault((_tags.opening, _tags.closing), _tags)


def tool_parser(chat_template: str, vocabulary: Collection[str]) -> str:
    """Return the name of the tool parser whose markers are present; `plain` if there are none."""
    has: Callable[[str], bool]
    for has in (chat_template.__contains__, frozenset(vocabulary).__contains__):
        for signs, name in _SIGNS:
            if all(map(has, signs)):
                return name
    return "plain"


def reasoning_tags(chat_template: str, vocabulary: Collection[str]) -> tuple[Tags, ...]:
    """Return the reasoning tags that the template contains, or that are tokens."""
    return tuple(
        tags
        for tags in _TAGS.values()
        if tags.closing in chat_template
        or (tags.opening in vocabulary and tags.closing in vocabulary)
    )
