"""Recognises a family by the markers in a chat template, or by the tokens in a vocabulary.

The template comes first: a fine-tuned model keeps the vocabulary of its base model, but the
template shows what it was trained on. Markers are tried from the most to the least specific.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.formats import families
from common.formats.reading import Tags

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("function_gemma", ("<start_function_call>",)),
    ("kimi_k3", ("<|open|>", "<|sep|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("gigachat35", ("｜GCML｜",)),
    ("step3", ("<steptml:invoke",)),
    ("hy_v3", ("<tool_sep:opensource>",)),
    ("hy_v4", ("<tool_call:opensource>",)),
    ("k2_horizon", ("<ifm|tool_call",)),
    ("iquest_coder_v2", ("<iquestcoder_tool_call>",)),
    ("solar_open2", ("<|tool_arg:start|>",)),
    ("plamo3", ("<|plamo:begin_tool_request",)),
    ("inkling", ("<|content_invoke_tool_json|>",)),
    ("gigachat3", ("function call<|role_sep|>",)),
    ("gigachat3", ("<|function_call|>", "<|role_sep|>")),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("hyperclovax", ("-> tool/function_call",)),
    ("dots", ("<dots_function_call>",)),
    ("pangu", ("[unused11]", "[unused12]")),
    ("command_r", ("Action:", "<|CHATBOT_TOKEN|>", "Grounded answer:")),
    ("functionary", (">>>all\n",)),
    ("functionary", ("'>>>all",)),
    ("phi4_mini_json", (" functools[",)),
    ("deepseek_v41", ("｜DSML｜ calls",)),
    ("deepseek_v4", ("｜DSML｜tool_calls",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("solar_open", ("<|tool_call:begin|>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("muse_glimmer", ("<atem:function_calls>", "<|eom|>", "<|message|>")),
    ("muse_spark", ("<atem:function_calls>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("minicpm5", ("<function name=",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("phi4_mini_json", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("olmo3", ("<function_calls>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("apriel", ("[BEGIN FINAL RESPONSE]",)),
    ("hunyuan_a13b", ("<answer>", "</answer>")),
    ("jamba", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("granite_20b_fc", ("<function_call>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama4_pythonic", ("<|header_start|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
_WITH_TAGS = (
    "qwen3 mistral seed_oss longcat gemma4 kimi_k3 muse_spark minimax_m3 cohere apertus apriel"
    " solar_open hy_v3 k2_horizon plamo3 inkling pangu"
)
_TAGS = tuple(
    dict.fromkeys(tags for name in _WITH_TAGS.split() for tags in families.REASONING[name])
)


def tool_parser(chat_template: str, vocabulary: Collection[str]) -> str:
    """The name of the tool parser whose markers are present; `plain` if there are none."""
    has: Callable[[str], bool]
    for has in (chat_template.__contains__, frozenset(vocabulary).__contains__):
        for name, markers in _SIGNS:
            if all(map(has, markers)):
                return name
    return "plain"


def reasoning_tags(chat_template: str, vocabulary: Collection[str]) -> tuple[Tags, ...]:
    """The reasoning tags that the template contains, or that are tokens."""
    return tuple(
        tags
        for tags in _TAGS
        if tags.closing in chat_template
        or (tags.opening in vocabulary and tags.closing in vocabulary)
    )
