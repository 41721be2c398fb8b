"""DeepSeek V3 and V3.1, Kimi K2, Solar Open: marked sections of calls."""

from __future__ import annotations

from tests.common.corpus import Call, Case

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})

DEEPSEEK_HEADER = "<｜Assistant｜>"
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_V3_FERRY = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ferry_times\n"
    '```json\n{"harbour": "Ærø"}\n```<｜tool▁call▁end｜>'
)
_V31_FERRY = '<｜tool▁call▁begin｜>ferry_times<｜tool▁sep｜>{"harbour": "Ærø"}<｜tool▁call▁end｜>'
_V31_TIDE = "<｜tool▁call▁begin｜>tide_now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"

DEEPSEEK_CASES = [
    Case("an output", "At <｜tool▁output▁begin｜>9<｜tool▁output▁end｜>.", "At 9."),
    *(
        Case(f"opened by {opener}", opener + _V3_FERRY + _END, calls=[A_FERRY])
        for opener in (
            "<｜tool_calls_begin｜>",
            "<｜tool calls begin｜>",
            r"<｜tool\_calls\_begin｜>",
            "<｜tool▁calls｜>",
        )
    ),
    Case(
        "line breaks around the markers",
        _BEGIN + _V31_FERRY.replace("ferry_times", "\nferry_times\n").replace("{", "\n{") + _END,
        calls=[A_FERRY],
    ),
    Case(
        "fenced without a first word",
        _BEGIN + _V31_FERRY.replace("{", "```json\n{").replace("}", "}\n```") + _END,
        calls=[A_FERRY],
    ),
    Case(
        "an empty code block",
        _BEGIN
        + _V3_FERRY.replace("ferry_times", "tide_now").replace('{"harbour": "Ærø"}\n', "")
        + _END,
        calls=[A_TIDE],
    ),
    *(
        Case(
            f"cut {left} characters before the end",
            (_BEGIN + call)[:-left],
            calls=[A_FERRY],
            cut=True,
        )
        for call, left in ((_V31_FERRY, 16), (_V31_FERRY, 1), (_V3_FERRY, 19), (_V3_FERRY, 5))
    ),
    Case(
        "a call after an unreadable one in a code block",
        _BEGIN + _V3_FERRY.replace("{", "{(") + _V3_FERRY + _END,
        _BEGIN + _V3_FERRY.replace("{", "{("),
        calls=[A_FERRY],
    ),
    Case(
        "calls beside an unreadable one",
        _BEGIN
        + "\n".join([_V3_FERRY, _V3_FERRY.replace('{"harbour": "Ærø"}', "x"), _V3_FERRY])
        + _END,
        _V3_FERRY.replace('{"harbour": "Ærø"}', "x").removesuffix("<｜tool▁call▁end｜>"),
        calls=[A_FERRY, A_FERRY],
    ),
    Case(
        "a word without quotes",
        _BEGIN + _V3_FERRY.replace('"Ærø"', "Ærø") + _END,
        calls=[A_FERRY],
    ),
    Case(
        "a fence too many",
        _BEGIN + _V31_FERRY.replace("}", "}\n```\n") + _V31_TIDE + _END,
        calls=[A_FERRY, A_TIDE],
    ),
    Case("a brace too few, and stopped", _BEGIN + _V3_FERRY.partition("}")[0], calls=[A_FERRY]),
    Case("a brace too few", _BEGIN + _V3_FERRY.replace("}", "") + _END, calls=[A_FERRY]),
    Case("a brace too many", _BEGIN + _V31_FERRY.replace("}", "}}") + _END, calls=[A_FERRY]),
    Case(
        "a marker twice",
        _BEGIN + _V31_TIDE.replace("<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>" * 2) + _END,
        calls=[A_TIDE],
    ),
    Case(
        "no name",
        f"{_BEGIN}{_V31_TIDE.replace('tide_now', '')}{_END}",
        f"{_BEGIN}{_V31_TIDE.replace('tide_now', '')}{_END}",
    ),
    Case("two openings", _BEGIN + _BEGIN + _V31_TIDE + _END, calls=[A_TIDE]),
    Case("fenced", _BEGIN + _V3_FERRY + _END, calls=[A_FERRY]),
    Case("null arguments", _BEGIN + _V31_TIDE.replace("{}", "null") + _END, calls=[A_TIDE]),
    Case("fenced, two", f"{_BEGIN}{_V3_FERRY}\n{_V3_FERRY}{_END}", calls=[A_FERRY, A_FERRY]),
    Case("bare, two", f"Hm.{_BEGIN}{_V31_FERRY}{_V31_TIDE}{_END}", "Hm.", calls=[A_FERRY, A_TIDE]),
    Case("nothing but text", "Nine, then.", "Nine, then."),
    Case(
        "reasoning from the prompt",
        f"So.</think>Hm.{_BEGIN}{_V31_TIDE}{_END}",
        "Hm.",
        "So.",
        [A_TIDE],
        DEEPSEEK_HEADER + "<think>",
    ),
    Case("thinking closed in the prompt", "Hm.", "Hm.", tail=DEEPSEEK_HEADER + "</think>"),
    Case("reasoning of its own", "<think>\nSo.\n</think>\n\nHm.", "Hm.", "So."),
    Case(
        "call inside reasoning",
        f"So.\n{_BEGIN}{_V31_TIDE}{_END}",
        "",
        "So.",
        [A_TIDE],
        DEEPSEEK_HEADER + "<think>",
    ),
    Case("no section", _V31_FERRY + _V31_TIDE, calls=[A_FERRY, A_TIDE]),
    Case("no end of the section", _BEGIN + _V31_FERRY, calls=[A_FERRY]),
    Case(
        "no end of the call",
        _BEGIN + _V31_FERRY.removesuffix("<｜tool▁call▁end｜>") + _END,
        calls=[A_FERRY],
    ),
    Case(
        "no mark of a call",
        _BEGIN + _V31_FERRY.removeprefix("<｜tool▁call▁begin｜>") + _END,
        calls=[A_FERRY],
    ),
    Case("text before a call", f"{_BEGIN} So:\n{_V3_FERRY}{_END}", calls=[A_FERRY]),
    Case("no separator", _BEGIN + _V31_FERRY.replace("<｜tool▁sep｜>", "") + _END, calls=[A_FERRY]),
    Case("text after", f"{_BEGIN}{_V31_TIDE}{_END}\nHm.", "Hm.", calls=[A_TIDE]),
    Case(
        "markers in a string",
        f"{_BEGIN}{_V31_FERRY.replace('Ærø', _END + '```<think>')}{_END}",
        calls=[("ferry_times", {"harbour": _END + "```<think>"})],
    ),
    Case("cut", (_BEGIN + _V3_FERRY)[:70], cut=True),
    Case(
        "second one cut",
        f"{_BEGIN}{_V31_TIDE}{_V31_FERRY[:45]}",
        calls=[A_TIDE],
        cut=True,
    ),
    Case("no tools", _BEGIN + _V31_TIDE + _END, _BEGIN + _V31_TIDE + _END, tools=[]),
    Case("quoted", f"`{_BEGIN}{_V31_TIDE}{_END}`", f"`{_BEGIN}{_V31_TIDE}{_END}`"),
]

KIMI_HEADER = "<|im_assistant|>assistant<|im_middle|>"
_OPEN, _CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_FERRY = (
    "<|tool_call_begin|>functions.ferry_times:0<|tool_call_argument_begin|>"
    '{"harbour": "Ærø"}<|tool_call_end|>'
)
_TIDE = "<|tool_call_begin|>functions.tide_now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"

KIMI_CASES = [
    Case(
        "a code block without a name",
        _OPEN + '\n```json\n{"harbour": "Ærø"}```' + _CLOSE,
        _OPEN + '\n```json\n{"harbour": "Ærø"}```' + _CLOSE,
    ),
    Case(
        "text before the end of the section",
        f"{_OPEN}{_TIDE} And so on.{_CLOSE}Hm.",
        " And so on.Hm.",
        calls=[A_TIDE],
    ),
    Case("two", _OPEN + _FERRY + _TIDE + _CLOSE, calls=[A_FERRY, A_TIDE]),
    Case("text before, a space kept", f"Hm. {_OPEN}{_TIDE}{_CLOSE}", "Hm. ", calls=[A_TIDE]),
    Case(
        "two sections",
        f"{_OPEN}{_FERRY}{_CLOSE}Hm.{_OPEN}{_TIDE}{_CLOSE}",
        "Hm.",
        "",
        [A_FERRY, A_TIDE],
    ),
    Case("an empty section", f"Hm.{_OPEN} {_CLOSE}", "Hm."),
    Case("a marker twice", f"{_OPEN}<|tool_call_begin|>{_TIDE}{_CLOSE}", calls=[A_TIDE]),
    Case("a brace too many", _OPEN + _FERRY.replace("}", "}}") + _CLOSE, calls=[A_FERRY]),
    Case("spaces between", f"{_OPEN} {_FERRY} {_TIDE} {_CLOSE}", calls=[A_FERRY, A_TIDE]),
    Case(
        "reasoning",
        f"So.</think>{_OPEN}{_TIDE}{_CLOSE}",
        "",
        "So.",
        [A_TIDE],
        KIMI_HEADER + "<think>",
    ),
    Case("no reasoning after all", "</think>Hm.", "Hm.", tail=KIMI_HEADER + "<think>"),
    Case(
        "call inside reasoning",
        f"So. {_OPEN}{_TIDE}{_CLOSE}",
        "",
        "So. ",
        [A_TIDE],
        KIMI_HEADER + "<think>",
    ),
    Case("no section", _TIDE, calls=[A_TIDE]),
    Case(
        "markers in the singular, as some checkpoints write them",
        f"Hm.{_OPEN}{_FERRY} {_TIDE}{_CLOSE}".replace("calls_section", "call_section"),
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("no end", (_OPEN + _FERRY).removesuffix("<|tool_call_end|>"), calls=[A_FERRY]),
    Case("no arguments", _OPEN + _TIDE.replace("{}", "") + _CLOSE, calls=[A_TIDE]),
    Case(
        "no mark of arguments",
        _OPEN + _TIDE.replace("<|tool_call_argument_begin|>", "") + _CLOSE,
        calls=[A_TIDE],
    ),
    Case(
        "no mark of a call",
        _OPEN + _FERRY.removeprefix("<|tool_call_begin|>") + _CLOSE,
        calls=[A_FERRY],
    ),
    Case("text before a call", f"{_OPEN} So, then: {_FERRY}{_CLOSE}", calls=[A_FERRY]),
    Case("text between calls", f"{_OPEN}{_FERRY}\nAnd{_TIDE}{_CLOSE}", calls=[A_FERRY, A_TIDE]),
    Case("text and no call", f"{_OPEN} So.{_CLOSE}", f"{_OPEN} So.{_CLOSE}"),
    Case(
        "only the index",
        _OPEN + _FERRY.replace("functions.ferry_times:", "") + _CLOSE,
        calls=[A_FERRY],
    ),
    Case("no index", _OPEN + _TIDE.replace(":1", "") + _CLOSE, calls=[A_TIDE]),
    *(
        Case(
            f"the id {identity}",
            _OPEN + _FERRY.replace("functions.ferry_times:0", identity) + _CLOSE,
            calls=[A_FERRY],
        )
        for identity in ("call_3", "chatcmpl-tool-1a", "functions.ferry_times:call_1")
    ),
    Case(
        "an id whose arguments fit several tools",
        _OPEN + _TIDE.replace("functions.tide_now:1", "call_3") + _CLOSE,
        calls=[("call_3", {})],
    ),
    Case(
        "one broken, one good",
        f"{_OPEN}{_FERRY.replace(':', '', 2)}{_TIDE}{_CLOSE}",
        _OPEN + _FERRY.replace(":", "", 2),
        calls=[A_TIDE],
    ),
    Case("cut", (_OPEN + _FERRY)[:95], cut=True),
    Case("no tools", _OPEN + _TIDE + _CLOSE, _OPEN + _TIDE + _CLOSE, tools=[]),
]

SOLAR_HEADER = "<|begin|>user<|content|>Hi<|end|><|begin|>assistant"
_SOLAR_TEXT = "<|begin|>assistant<|content|>"
_SOLAR_FERRY = (
    "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>ferry_times"
    '<|tool_call:args|>{"harbour": "Ærø"}<|tool_call:end|>'
)
_SOLAR_TIDE = "<|tool_call:begin|>1<|tool_call:name|>tide_now<|tool_call:args|>{}<|tool_call:end|>"
_SOLAR_CALLS = f"<|begin|>assistant<|tool_calls|>{_SOLAR_FERRY}{_SOLAR_TIDE}<|calls|>"
SOLAR = [
    Case("thinking", f"<|think|>So.<|end|>{_SOLAR_TEXT}Hm.<|flush|>", "Hm.", "So."),
    Case("no thinking", "<|content|>Hm.<|end|>", "Hm.", tail=SOLAR_HEADER + "<|think|><|end|>"),
    Case(
        "thinking opened by the prompt",
        f"So.<|end|>{_SOLAR_TEXT}Hm.",
        "Hm.",
        "So.",
        tail=SOLAR_HEADER + "<|think|>",
    ),
    Case("calls", f"<|think|>So.<|end|>{_SOLAR_CALLS}", "", "So.", [A_FERRY, A_TIDE]),
    Case(
        "text and calls",
        f"<|content|>Hm.<|end|>{_SOLAR_CALLS}",
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case(
        "no end of the section",
        f"<|tool_calls|>{_SOLAR_FERRY}",
        calls=[A_FERRY],
    ),
    Case("no section", _SOLAR_FERRY, calls=[A_FERRY]),
    Case("no id", _SOLAR_FERRY.replace("a1b2c3d4e5", ""), calls=[A_FERRY]),
    Case("no arguments", _SOLAR_TIDE.replace("{}", ""), calls=[A_TIDE]),
    Case("thinking left open", f"<|think|>So.{_SOLAR_TEXT}Hm.", "Hm.", "So."),
    Case("JSON", '<|content|>{"a": 1}<|flush|>', '{"a": 1}'),
    Case("cut", f"<|tool_calls|>{_SOLAR_FERRY[:40]}", cut=True),
    Case("cut in the arguments", f"<|tool_calls|>{_SOLAR_FERRY[:-25]}", cut=True),
]
