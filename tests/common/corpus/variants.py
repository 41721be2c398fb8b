"""The same few answers in families that vary the markers of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.common.corpus import Call, Case

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})
_THINK = ("<think>", "</think>")


def _answers(
    pair: Iterable[str],
    block: Callable[[str], str] = lambda calls: calls,
    *,
    between: str | None = "\n",
    think: tuple[str, str] = _THINK,
) -> list[Case]:
    """pair: a call of the ferries and one of the tide. between: the text between two calls; None if
    the family makes only one.
    """
    ferry, tide = pair
    start, end = think
    one = block(ferry)
    cases = [
        Case("one", one, calls=[A_FERRY]),
        Case("text before", f"Hm.\n{block(tide)}", "Hm.", calls=[A_TIDE]),
        Case("thinking", f"{start}So.{end}{one}", "", "So.", [A_FERRY]),
        Case("an answer", f"{start}So.{end}Hm.", "Hm.", "So."),
        Case("cut", one[: one.index("Æ") + 1], cut=True),
    ]
    if between is not None:
        both = block(f"{ferry}{between}{tide}")
        cases.append(Case("two", both, calls=[A_FERRY, A_TIDE]))
    return cases


def _keyed(prefix: str, suffix: str = "", after_name: str = "", line: str = "\n") -> list[str]:
    def tag(name: str) -> str:
        return f"{prefix}{name}{suffix}>"

    argument = (
        f"<{tag('arg_key')}harbour</{tag('arg_key')}{line}"
        f"<{tag('arg_value')}Ærø</{tag('arg_value')}{line}"
    )
    return [
        f"<{tag('tool_call')}{name}{after_name}{line}{inside}</{tag('tool_call')}"
        for name, inside in (("ferry_times", argument), ("tide_now", ""))
    ]


def _invoked(prefix: str, flag: str = "") -> list[str]:
    argument = f'<{prefix}parameter name="harbour"{flag}>Ærø</{prefix}parameter>\n'
    return [
        f'<{prefix}invoke name="{name}">\n{inside}</{prefix}invoke>'
        for name, inside in (("ferry_times", argument), ("tide_now", ""))
    ]


def _objects(
    before: str, after: str, arguments: str = "arguments", name: str = "name"
) -> list[str]:
    return [
        f'{before}{{"{name}": "{called}", "{arguments}": {given}}}{after}'
        for called, given in (("ferry_times", '{"harbour": "Ærø"}'), ("tide_now", "{}"))
    ]


def _between(start: str, end: str) -> Callable[[str], str]:
    return lambda calls: f"{start}{calls}{end}"


_CLOVA = "<|im_end|>\n<|im_start|>assistant"
_OBJECT = _objects("", "")[0]
_SAVE = '{"name": "save_note", "arguments": {"text": "a <|im_end|> b"}}'


def _plamo(word: str, inside: str) -> str:
    return f"<|plamo:begin_{word}:plamo|>{inside}<|plamo:end_{word}:plamo|>"


def _requested(name: str, arguments: str) -> str:
    written = f"<|plamo:constrain|>json<|plamo:msg|>{arguments}"
    return _plamo("tool_request", _plamo("tool_name", name) + _plamo("tool_arguments", written))


_LABEL = ":opensource"
_HY_BLOCK = _between(f"<tool_calls{_LABEL}>\n", f"\n</tool_calls{_LABEL}>")
_HY_THINK = (f"<think{_LABEL}>", f"</think{_LABEL}>")
_IFM = _keyed("ifm|", line="")
_STEP = [
    f"<｜tool_call_begin｜>function<｜tool_sep｜>{call}<｜tool_call_end｜>"
    for call in _invoked("steptml:")
]
_NAMED_STEP = _STEP[0].replace("sep｜>", "sep｜>ferry_times\n")
_NAMED_STEP = f"<｜tool_calls_begin｜>{_NAMED_STEP}<｜tool_calls_end｜>"
_STARTS, _VALUE, _ENDS = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"
_SOLAR2 = [
    f"<|tool_call:start|>{name}\n{inside}<|tool_call:end|>"
    for name, inside in (("ferry_times", f"{_STARTS}harbour{_VALUE}Ærø{_ENDS}\n"), ("tide_now", ""))
]
_REQUESTS = [_requested("ferry_times", '{"harbour": "Ærø"}'), _requested("tide_now", "{}")]
_ACTION = _objects("", "", "parameters", "tool_name")
_MODEL, _OVER = "<|message_model|>", "<|end_message|>"
_INVOKED = [
    f"{_MODEL}{name}<|content_invoke_tool_json|>{call}{_OVER}"
    for name, call in zip(("ferry_times", "tide_now"), _objects("", "", "args"), strict=True)
]
_LIST = _between("[", "]")
_FUNCTION_CALL = "<|message_sep|>\n\nfunction call<|role_sep|>\n"

Names = tuple[str, str | None, str]
VARIANTS: dict[Names, list[Case]] = {
    ("hy_v3", "hy_v3", ""): [
        *_answers(_keyed("", _LABEL, f"<tool_sep{_LABEL}>"), _HY_BLOCK, think=_HY_THINK),
        *_answers(_keyed("", "", "<tool_sep>"), _between("<tool_calls>", "</tool_calls>")),
    ],
    ("hy_v4", "hy_v4", ""): _answers(_keyed("", _LABEL, line=""), _HY_BLOCK, think=_HY_THINK),
    ("k2_horizon", None, ""): [
        *_answers(
            _IFM,
            _between("<ifm|tool_calls>", "</ifm|tool_calls>"),
            think=("<ifm|think_fast>", "</ifm|think_fast>"),
        ),
        Case(
            "a type",
            f"<ifm|tool_calls>{_IFM[0]}</ifm|tool_calls>".replace(
                "<ifm|arg_value>", "<ifm|arg_type>string</ifm|arg_type><ifm|arg_value>"
            ),
            calls=[A_FERRY],
        ),
        Case(
            "JSON",
            "<ifm|tool_calls>"
            + "\n".join(_objects("<ifm|tool_call>", "</ifm|tool_call>"))
            + "</ifm|tool_calls>",
            calls=[A_FERRY, A_TIDE],
        ),
    ],
    ("iquest_coder_v2", None, ""): _answers(
        call.replace("tool_call>", "iquestcoder_tool_call>") for call in _keyed("")
    ),
    ("solar_open2", None, ""): _answers(_SOLAR2, think=("<|think:start|>", "<|think:end|>")),
    ("gigachat35", None, ""): _answers(
        _invoked("｜GCML｜", ' string="true"'),
        _between("<｜GCML｜tool_calls>\n", "\n</｜GCML｜tool_calls>"),
    ),
    ("dots", None, ""): _answers(
        _invoked(""), _between("<dots_function_call>\n", "\n</dots_function_call>")
    ),
    ("step3", None, ""): [
        *_answers(_STEP, _between("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")),
        Case("the tool's name before the call", _NAMED_STEP, calls=[A_FERRY]),
    ],
    ("step3p5", "step3p5", ""): [
        Case("a thought after text before", "Hm.<think>So.</think>\nAh.", "Hm.\nAh.", "So."),
        Case("a thought after text before, no end", "Hm.<think>So.", "Hm.", "So."),
    ],
    ("granite_20b_fc", None, ""): _answers(_objects("<function_call> ", "")),
    ("plamo3", None, ""): _answers(
        _REQUESTS,
        lambda calls: _plamo("tool_requests", calls),
        between="",
        think=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ),
    ("internlm", None, ""): [
        *_answers(_objects("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters")),
        *_answers(_objects("<|action_start|> <|plugin|>\n", "<|action_end|>"), between=None),
    ],
    ("gigachat3", None, ""): [
        *_answers(_objects("<|function_call|>", ""), between=None),
        *_answers(_objects(_FUNCTION_CALL, ""), between=None),
    ],
    ("hyperclovax", "hyperclovax", "<|im_end|>\n<|im_start|>assistant"): [
        *_answers(
            _objects("", ""),
            _between(f"{_CLOVA} -> tool/function_call\n[", "]<|im_end|>"),
            between=", ",
            think=("/think\n", _CLOVA),
        ),
        Case("an answer of its own", "\nHm.", "Hm."),
        Case("a list without its marker", f"\n[{_OBJECT}]<|im_end|>", calls=[A_FERRY]),
        Case("a list that is an answer", "[1, 2]", "[1, 2]"),
        Case("a call of its own", f" -> tool/function_call\n[{_OBJECT}]", calls=[A_FERRY]),
        Case(
            "a thought of the prompt", f"So.{_CLOVA}\nHm.", "Hm.", "So.", tail="assistant/think\n"
        ),
        Case("no end of a thought", "/think\nSo.", "", "So."),
        Case(
            "the end's token in a string",
            f" -> tool/function_call\n[{_SAVE}]<|im_end|>",
            calls=[("save_note", {"text": "a <|im_end|> b"})],
        ),
    ],
    ("sarashina", None, ""): _answers(
        _objects("", ""), _between("<|tool_calls|>[", "]"), between=", "
    ),
    ("pangu", "pangu", ""): _answers(
        _objects("", ""),
        _between("[unused11][", "][unused12]"),
        between=", ",
        think=("[unused16]", "[unused17]"),
    ),
    ("inkling", None, _MODEL): [
        *_answers(_INVOKED, between="", think=("<|content_thinking|>", _OVER)),
        Case(
            "all of it",
            f"<|content_thinking|>So.{_OVER}{_MODEL}<|content_text|>Hm.{_OVER}"
            f"{_INVOKED[0]}<|content_model_end_sampling|>",
            "Hm.",
            "So.",
            [A_FERRY],
        ),
        Case("without opening", _INVOKED[0].removeprefix(_MODEL), calls=[A_FERRY]),
        Case("a message that does not come", f"<|content_text|>Hm.{_OVER}{_MODEL}", "Hm."),
        Case("an error", f"<|content_tool_error|>Hm.{_OVER}", "Hm."),
    ],
    ("command_r", None, ""): [
        Case(
            "an action that looks like prose",
            f"Action: ```json\n[{_ACTION[0]},\n{_ACTION[1]}]\n```",
            calls=[A_FERRY, A_TIDE],
        ),
        Case(
            "text before",
            f"Plan: look.\nAction:\n```json\n[{_ACTION[1]}]\n```",
            "Plan: look.",
            calls=[A_TIDE],
        ),
        Case("cut", f"Action: ```json\n[{_ACTION[0]}"[:60], cut=True),
        Case("an action of a play", "Action: she leaves.", "Action: she leaves."),
        Case("citations", "By <co: 0,1>ferry</co: 0,1>.<|END_OF_TURN_TOKEN|>", "By ferry."),
    ],
    ("functionary_v3_1", None, ""): [
        Case(
            "two",
            'Hm.<function=ferry_times>{"harbour": "Ærø"}</function>'
            "<function=tide_now>{}</function>",
            "Hm.",
            calls=[A_FERRY, A_TIDE],
        ),
        Case(
            "no end of the first",
            '<function=ferry_times>{"harbour": "Ærø"}\n<function=tide_now>{}</function>',
            calls=[A_FERRY, A_TIDE],
        ),
    ],
    ("functionary", None, "assistant<|end_header_id|>\n\n>>>"): [
        Case("an answer", "all\nHm.", "Hm."),
        Case("a call", 'ferry_times\n{"harbour": "Ærø"}', calls=[A_FERRY]),
        Case(
            "an answer and calls",
            'all\nHm.\n>>>ferry_times\n{"harbour": "Ærø"}\n>>>tide_now\n{}',
            "Hm.",
            calls=[A_FERRY, A_TIDE],
        ),
        Case("a call and an answer", "tide_now\n{}\n>>>all\nHm.", "Hm.", calls=[A_TIDE]),
        Case("what looks like one", "all\n>>> print(1)\n1", ">>> print(1)\n1"),
        Case("cut", 'ferry_times\n{"harbour": "Æ', cut=True),
    ],
    ("xlam", None, ""): [
        Case(
            "a list", ", ".join(_objects("[", "]")).replace("], [", ", "), calls=[A_FERRY, A_TIDE]
        ),
        Case("thinking", f"<think>So.</think>{_LIST(_objects('', '')[0])}", "", "So.", [A_FERRY]),
        Case(
            "what looks like code",
            f"Hm.\n```json\n{_LIST(_objects('', '')[0])}\n```",
            "Hm.",
            calls=[A_FERRY],
        ),
        Case("marked", f"Hm.[TOOL_CALLS]{_LIST(_objects('', '')[1])}", "Hm.", calls=[A_TIDE]),
        Case("in tags", f"<tool_call>{_LIST(_objects('', '')[1])}</tool_call>", calls=[A_TIDE]),
        Case("another list", "[1, 2]", "[1, 2]"),
        Case("another block", (text := "Hm.\n```json\n[1]\n```"), text),
        Case("cut", _LIST(_objects("", "")[0])[:40], cut=True),
    ],
}
