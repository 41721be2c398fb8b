"""Cohere's, Apertus', Hunyuan's and Nemotron's blocks of JSON."""

from __future__ import annotations

from tests.common.corpus import Call, Case

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})
COHERE_HEADER = "<|CHATBOT_TOKEN|><|START_THINKING|>"
_ACTION = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "ferry_times", "parameters":'
    ' {"harbour": "Ærø"}},\n    {"tool_call_id": "1", "tool_name": "tide_now", "parameters": {}}\n]'
    "<|END_ACTION|>"
)
COHERE = [
    Case("thinking", "So.<|END_THINKING|>" + _ACTION, "", "So.", [A_FERRY, A_TIDE]),
    Case("no thinking", f"<|END_THINKING|>{_ACTION}", calls=[A_FERRY, A_TIDE]),
    Case("an answer", "<|END_THINKING|><|START_TEXT|>Hm.<|END_TEXT|>", "Hm."),
    Case("JSON", '<|END_THINKING|><|START_TEXT|>{"a": 1}<|END_TEXT|>', '{"a": 1}'),
    Case("a response", "<|START_RESPONSE|>Hm.<|END_RESPONSE|>", "Hm.", tail="<|CHATBOT_TOKEN|>"),
    Case("thinking left open", "So.<|START_RESPONSE|>Hm.<|END_RESPONSE|>", "Hm.", "So."),
    Case(
        "all of it",
        f"<|START_THINKING|>So.<|END_THINKING|>{_ACTION}",
        "",
        "So.",
        [A_FERRY, A_TIDE],
        tail="<|CHATBOT_TOKEN|>",
    ),
    Case("cut", "<|END_THINKING|>" + _ACTION[:60], cut=True),
    Case("no tools", "<|END_THINKING|><|START_TEXT|>Hm.<|END_TEXT|>", "Hm.", tools=[]),
    Case(
        "citations",
        "So <co>it is</co: 0:[1]>.<|END_THINKING|><|START_TEXT|>By\n<co>ferry</co: 0:[1,2],1:[0]>,"
        " at `<co>` nine</co: x.<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        "By\nferry, at `<co>` nine</co: x.",
        "So it is.",
    ),
    Case("a citation, cut", "<|END_THINKING|>By <co>ferry</co: 0:[", "By ferry", cut=True),
    Case("no comma", "<|END_THINKING|>" + _ACTION.replace("},\n", "}\n"), calls=[A_FERRY, A_TIDE]),
]
_PREFIXED = '<|tools_prefix|>[{"ferry_times": {"harbour": "Ærø"}}, {"tide_now": {}}]'
APERTUS = [
    Case("two", f"{_PREFIXED}<|tools_suffix|>", calls=[A_FERRY, A_TIDE]),
    Case("no suffix", _PREFIXED, calls=[A_FERRY, A_TIDE]),
    Case("no comma", _PREFIXED.replace("}}, {", "}} {"), calls=[A_FERRY, A_TIDE]),
    Case("a brace too many inside", _PREFIXED.replace("}}, {", "}}}, {"), calls=[A_FERRY, A_TIDE]),
    Case("a comma too many", f"{_PREFIXED[:-1]},]<|tools_suffix|>", calls=[A_FERRY, A_TIDE]),
    Case("text before", f"Hm.\n{_PREFIXED}<|tools_suffix|>", "Hm.", calls=[A_FERRY, A_TIDE]),
    Case("text after", f"{_PREFIXED}<|tools_suffix|>Hm.", "Hm.", calls=[A_FERRY, A_TIDE]),
    Case(
        "a bracket too many",
        f"{_PREFIXED}]<|tools_suffix|>",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("null", '<|tools_prefix|>[{"tide_now": null}]<|tools_suffix|>', calls=[A_TIDE]),
    Case("thinking", "<|inner_prefix|>So.<|inner_suffix|>Hm.", "Hm.", "So."),
    Case(
        "thinking twice",
        f"<|inner_prefix|>So.<|inner_suffix|>{_PREFIXED}<|tools_suffix|><|inner_prefix|>Oh."
        "<|inner_suffix|>Hm.",
        "Hm.",
        "So.Oh.",
        [A_FERRY, A_TIDE],
    ),
    Case("not arguments", '<|tools_prefix|>[{"tide_now": 3}]', '<|tools_prefix|>[{"tide_now": 3}]'),
    Case("cut", _PREFIXED[:42], cut=True),
]
_LIST = '[{"name": "ferry_times", "arguments": {"harbour": "Ærø"}}, {"name": "tide_now"}]'
HUNYUAN = [
    Case("an answer", "<think>\nSo.\n</think>\n<answer>\nHm.\n</answer>", "Hm.", "So."),
    Case(
        "calls in the answer",
        f"<think>\nSo.\n</think>\n<answer>\n<tool_calls>{_LIST}</tool_calls>\n</answer>",
        "",
        "So.",
        [A_FERRY, A_TIDE],
    ),
    Case("only calls", f"<tool_calls>{_LIST}</tool_calls>", calls=[A_FERRY, A_TIDE]),
    Case("thinking left open", "<think>\nSo.\n<answer>\nHm.\n</answer>", "Hm.", "So."),
    Case("cut", f"<answer>\n<tool_calls>{_LIST[:30]}", cut=True),
]
APRIEL_HEADER = "<|begin_assistant|>\nHere are my reasoning steps:\n"
_FINAL = "[BEGIN FINAL RESPONSE]"
APRIEL = [
    Case("tags", "<thinking>\nSo.\n</thinking>\nHm.", "Hm.", "So.", tail=""),
    Case("an answer", f"So.\n{_FINAL}\nHm.\n[END FINAL RESPONSE]\n", "Hm.", "So."),
    Case("no end", f"So.\n{_FINAL}\nHm.", "Hm.", "So."),
    Case(
        "a call", f"So.\n{_FINAL}\n<tool_calls>{_LIST}</tool_calls>", "", "So.", [A_FERRY, A_TIDE]
    ),
    Case(
        "a call without an answer",
        f"So.\n<tool_calls>{_LIST}</tool_calls>",
        "",
        "So.",
        [A_FERRY, A_TIDE],
    ),
    Case("JSON", f'So.\n{_FINAL}\n{{"a": 1}}', '{"a": 1}', "So."),
    Case("left open", "So", "", "So", cut=True),
    Case("the mark is cut", "So.\n[BEGIN FINAL", "", "So.", cut=True),
    Case(
        "a prompt that explains it",
        f"Here are my reasoning steps:\nSo.\n{_FINAL}\nHm.",
        "Hm.",
        "So.",
        tail="Write: Here are my reasoning steps: … <|end|>\n<|begin_assistant|>\n",
    ),
]
NEMOTRON_HEADER = "<SPECIAL_11>Assistant\n<think>\n\n"
NEMOTRON = [
    Case(
        "a comma too many",
        f"</think>\n<TOOLCALL>{_LIST[:-1]},]</TOOLCALL>",
        calls=[A_FERRY, A_TIDE],
    ),
    Case(
        "strings among the calls",
        f'</think>\n<TOOLCALL>{_LIST[:-1]}, "tide", "now"]</TOOLCALL>Hm.',
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case(
        "thinking",
        f"So.\n</think>\n\n<TOOLCALL>{_LIST}</TOOLCALL>\n",
        "",
        "So.",
        [A_FERRY, A_TIDE],
    ),
    Case(
        "no thinking",
        f"<TOOLCALL>{_LIST}</TOOLCALL>",
        calls=[A_FERRY, A_TIDE],
        tail="<SPECIAL_11>Assistant\n<think></think>",
    ),
    Case("one object", '</think><TOOLCALL>{"name": "tide_now"}</TOOLCALL>', calls=[A_TIDE]),
    Case("cut", "</think>Hm.\n<TOOLC", "Hm.", cut=True),
]
