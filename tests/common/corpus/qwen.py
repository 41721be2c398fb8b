"""Qwen3, Hermes and Qwen3-Coder: `<tool_call>` blocks with JSON or tagged parameters."""

from __future__ import annotations

from tests.common.corpus import Call, Case

HEADER = "<|im_start|>assistant\n"
THINKING = HEADER + "<think>\n"
SILENT = HEADER + "<think>\n\n</think>\n\n"
FERRY = '<tool_call>\n{"name": "ferry_times", "arguments": {"harbour": "Ærø"}}\n</tool_call>'
TIDE = '<tool_call>\n{"name": "tide_now", "arguments": {}}\n</tool_call>'
A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})

JSON_CASES = [
    Case(
        "without opening of the template, but others'",
        "Hm.\n<tools>\n"
        f"{FERRY[12:-13]}\n</tools>\n<tools>\n{TIDE[12:-13]}\n</tools>\n"
        f"<function_call> {FERRY[12:-13]} </function_call>",
        "Hm.",
        calls=[A_FERRY, A_TIDE, A_FERRY],
    ),
    Case(
        "text in tags that looks like a call's",
        '<tools>\n{"name": "Ann"}\n</tools>',
        '<tools>\n{"name": "Ann"}\n</tools>',
    ),
    Case("an opening mark at the end", f"{FERRY[:-12]}<tool_call>", calls=[A_FERRY]),
    Case("an opening mark alone", "Hm. <tool_call>", "Hm. <tool_call>"),
    Case(
        "the block of several calls, without opening of the template",
        f"Hm.\n<tool_calls>\n[{FERRY[12:-13]}, {TIDE[12:-13]}]\n</tool_calls>",
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("one mark too many before", f"<tool_call>\n{FERRY}", calls=[A_FERRY]),
    Case(
        "Python's words",
        '<tool_call>{"name": "f", "arguments": {"a": True, "b": [None]}}</tool_call>',
        calls=[("f", {"a": True, "b": [None]})],
    ),
    Case(
        "Python's quotes",
        "<tool_call>{'name': 'save_note', "
        """'arguments': {'text': 'It\\'s "so"', 'n': None}}</tool_call>""",
        calls=[("save_note", {"text": 'It\'s "so"', "n": None})],
    ),
    Case(
        "a code block inside",
        f"<tool_call>\n```json\n{FERRY[12:-13]}\n```\n</tool_call>",
        calls=[A_FERRY],
    ),
    Case(
        "two objects with a comma between them",
        f"{FERRY.removesuffix('</tool_call>')},{TIDE.removeprefix('<tool_call>')}",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("arguments called input", FERRY.replace('"arguments"', '"input"'), calls=[A_FERRY]),
    Case(
        "arguments beside the name",
        '<tool_call>{"name": "ferry_times", "harbour": "Ærø", "note": 1}</tool_call>',
        calls=[A_FERRY],
    ),
    Case("a name with a prefix", FERRY.replace("ferry_", "functions.ferry_"), calls=[A_FERRY]),
    Case("plain", "The last boat leaves at nine.", "The last boat leaves at nine."),
    Case("whitespace inside an answer", "  a\n\n\nb \n", "  a\n\n\nb \n"),
    Case("one call", FERRY, calls=[A_FERRY]),
    Case("two calls", f"{FERRY}\n{TIDE}", calls=[A_FERRY, A_TIDE]),
    Case("text before", f"One moment.\n{FERRY}", "One moment.", calls=[A_FERRY]),
    Case("text around", f"One.\n{TIDE}\nTwo.", "One.\nTwo.", calls=[A_TIDE]),
    Case(
        "reasoning, answer",
        "<think>\nBoats, hm.\n\nYes.\n</think>\n\nNine.",
        "Nine.",
        "Boats, hm.\n\nYes.",
    ),
    Case("reasoning, call", f"<think>\nLook.\n</think>\n\n{FERRY}", "", "Look.", [A_FERRY]),
    Case("no opening tag", f"Look.\n</think>\n\n{FERRY}", "", "Look.", [A_FERRY], THINKING),
    Case("opening tag again", "<think>\nLook.\n</think>\nSo.", "So.", "Look.", tail=THINKING),
    Case("empty reasoning", "<think>\n\n</think>\n\nNine.", "Nine."),
    Case("closed in the prompt", "Nine.", "Nine.", tail=SILENT),
    Case("closed once more", "</think>\n\nNine.", "Nine.", tail=SILENT),
    Case("reasoning left open", "I wonder\nwhether", "", "I wonder\nwhether", [], THINKING, True),
    Case("prefilled reasoning", " on.</think>No.", "No.", " on.", tail=THINKING + "Boats go"),
    Case(
        "call inside reasoning",
        f"I will look.\n{FERRY}",
        "",
        "I will look.",
        [A_FERRY],
        THINKING,
    ),
    Case(
        "call inside reasoning that continues",
        f"Look.\n{FERRY}\nAnd wait.\n</think>\n\nDone.",
        "Done.",
        "Look.\nAnd wait.",
        [A_FERRY],
        THINKING,
    ),
    Case(
        "call quoted in a sentence of reasoning",
        f"I must write `{TIDE}` or {TIDE} then.\n</think>\nHm.",
        "Hm.",
        f"I must write `{TIDE}` or {TIDE} then.",
        tail=THINKING,
    ),
    Case(
        "marker named in reasoning",
        "The <tool_call> tag, then `</think>`.\n</think>\nHm.",
        "Hm.",
        "The <tool_call> tag, then `</think>`.",
        tail=THINKING,
    ),
    Case("inline code", f"Write `{TIDE}`.", f"Write `{TIDE}`."),
    Case("inline code that continues", f"Write `x {TIDE} y`.", f"Write `x {TIDE} y`."),
    Case("a stray backtick", f"The ` key.{TIDE}", "The ` key.", calls=[A_TIDE]),
    Case("code block", f"So:\n```xml\n{TIDE}\n```\n", f"So:\n```xml\n{TIDE}\n```\n"),
    Case("after a code block", f"```\nx\n```\n{TIDE}", "```\nx\n```", calls=[A_TIDE]),
    Case(
        "tag in prose",
        "The <tool_call> tag. The <think> tag.",
        "The <tool_call> tag. The <think> tag.",
    ),
    Case(
        "markers inside a string",
        '<tool_call>\n{"name": "save_note", "arguments": {"path": "a", "text": '
        '"</tool_call> <think> {\\"b\\": [1}"}}\n</tool_call>',
        calls=[("save_note", {"path": "a", "text": '</tool_call> <think> {"b": [1}'})],
    ),
    Case(
        "values",
        '<tool_call>{"name":"book_cabin","arguments":{"berths":9007199254740993,"price":1.5e3,'
        '"pets":false,"remark":null,"guests":["Bo","\\u00d8"],"route":{"a":{"b":[]}}}}</tool_call>',
        calls=[
            (
                "book_cabin",
                {
                    "berths": 9007199254740993,
                    "price": 1500.0,
                    "pets": False,
                    "remark": None,
                    "guests": ["Bo", "Ø"],
                    "route": {"a": {"b": []}},
                },
            )
        ],
    ),
    Case(
        "raw line breaks and unknown escapes",
        '<tool_call>{"name": "save_note", "arguments": {"text": "a\nb\\d\t"}}</tool_call>',
        calls=[("save_note", {"text": "a\nb\\d\t"})],
    ),
    Case(
        "arguments as a string",
        '<tool_call>{"name": "ferry_times", "arguments": "{\\"harbour\\": \\"Ærø\\"}"}</tool_call>',
        calls=[A_FERRY],
    ),
    Case("no arguments", '<tool_call>{"name": "tide_now"}</tool_call>', calls=[A_TIDE]),
    Case("a list for no arguments", TIDE.replace("{}", "[]"), calls=[A_TIDE]),
    Case(
        "numbers that JSON does not have",
        '<tool_call>{"name": "f", "arguments": {"a": NaN, "b": [-Infinity]}}</tool_call>',
        calls=[("f", {"a": None, "b": [None]})],
    ),
    Case(
        "null arguments",
        '<tool_call>{"name":"tide_now","arguments":null}</tool_call>',
        calls=[A_TIDE],
    ),
    Case(
        "an unknown name",
        '<tool_call>{"name": "x", "arguments": {}}</tool_call>',
        calls=[("x", {})],
    ),
    Case("no closing tag", FERRY.removesuffix("\n</tool_call>"), calls=[A_FERRY]),
    Case("no closing tag, twice", TIDE.removesuffix("</tool_call>") + TIDE, calls=[A_TIDE, A_TIDE]),
    Case("no opening tag of a call", FERRY.removeprefix("<tool_call>\n"), calls=[A_FERRY]),
    Case("a brace too few", FERRY.replace("}}", "}"), calls=[A_FERRY]),
    Case("a brace too many", FERRY.replace("}}", "}}}"), calls=[A_FERRY]),
    Case("not JSON", "<tool_call>ferries</tool_call>", "<tool_call>ferries</tool_call>"),
    Case("no name", '<tool_call>{"a": 1}</tool_call> x', '<tool_call>{"a": 1}</tool_call> x'),
    Case("cut in a string", FERRY[:60], cut=True),
    Case(
        "cut in a second call",
        f"Hm.\n{TIDE}\n{FERRY[:50]}",
        "Hm.",
        calls=[A_TIDE],
        cut=True,
    ),
    Case("cut before the closing tag", FERRY[:-8], calls=[A_FERRY], cut=True),
    Case("no tools offered", f"Hm.\n{FERRY}\n", f"Hm.\n{FERRY}\n", tools=[]),
    Case("an answer in JSON", '{"name": "Bo", "age": 7}', '{"name": "Bo", "age": 7}'),
    *(
        Case(f"a name as an attribute, {why}", text.replace("#", inside), calls=[A_FERRY])
        for why, inside in (
            ("JSON", '<function name="ferry_times">\n{"harbour": "Ærø"}\n</function>'),
            (
                "parameters",
                '<function name="ferry_times"><parameter name="harbour">Ærø</parameter></function>',
            ),
        )
        for text in ("<tool_call>\n#\n</tool_call>", "#", "<tool_call>#")
    ),
    Case("a stray closing tag", "Nine.\n</tool_call>", "Nine."),
    Case("a stray closing tag alone", "</tool_call>"),
    Case("a closing tag in a line", "A </tool_call> ends it.", "A </tool_call> ends it."),
    Case("a quoted closing tag", "It is `</tool_call>`", "It is `</tool_call>`"),
    Case(
        "tagged parameters",
        "<tool_call>\n<function=tide_now>\n</function>\n</tool_call>",
        calls=[A_TIDE],
    ),
]

_NOTE = (
    "<function=save_note>\n<parameter=path>\na.md\n</parameter>\n"
    "<parameter=text>\n{}\n</parameter>\n</function>"
)
_FERRY = (
    "<tool_call>\n<function=ferry_times>\n<parameter=harbour>\nÆrø\n</parameter>\n"
    "</function>\n</tool_call>"
)


def _note(text: str) -> str:
    return "<tool_call>\n" + _NOTE.replace("{}", text) + "\n</tool_call>"


def _noted(text: str) -> list[Call]:
    return [("save_note", {"path": "a.md", "text": text})]


XML_CASES = [
    Case("one mark too many before", f"<tool_call>\n{_FERRY}", calls=[A_FERRY]),
    Case("one call", _FERRY, calls=[A_FERRY]),
    Case(
        "two calls, text before",
        f"Hm.\n\n{_FERRY}\n{_note('x')}",
        "Hm.",
        calls=[A_FERRY, *_noted("x")],
    ),
    Case("reasoning", f"So.\n</think>\n\n{_FERRY}", "", "So.", [A_FERRY], THINKING),
    Case("inside reasoning", f"So.\n{_FERRY}\n</think>\n\nHm.", "Hm.", "So.", [A_FERRY], THINKING),
    Case("whitespace of a value", _note("  a\n\n b \n"), calls=_noted("  a\n\n b \n")),
    Case("an empty value", _note(""), calls=_noted("")),
    Case(
        "markup in a value",
        _note("<a b='c'>&amp;</a> <think>"),
        calls=_noted("<a b='c'>&amp;</a> <think>"),
    ),
    Case("a call in a value", _note(f"x\n{_FERRY}\ny"), calls=_noted(f"x\n{_FERRY}\ny")),
    Case(
        "tags in a value",
        _note("a </parameter> b </function> c <tool_call> <parameter=path> </tool_call> d"),
        calls=_noted("a </parameter> b </function> c <tool_call> <parameter=path> </tool_call> d"),
    ),
    Case("an opening tag in a value", _note("a <function=x> b"), calls=_noted("a <function=x> b")),
    Case(
        "types",
        "<tool_call>\n<function=book_cabin>\n"
        + "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n"
            for key, value in {
                "berths": "9007199254740993",
                "price": "2.50",
                "pets": "True",
                "guests": '["Bo", "Ib"]',
                "route": "{'via': None}",
                "remark": "null",
                "code": "007",
                "extra": "12",
            }.items()
        )
        + "</function>\n</tool_call>",
        calls=[
            (
                "book_cabin",
                {
                    "berths": 9007199254740993,
                    "price": 2.5,
                    "pets": True,
                    "guests": ["Bo", "Ib"],
                    "route": {"via": None},
                    "remark": None,
                    "code": "007",
                    "extra": "12",
                },
            )
        ],
    ),
    Case(
        "a key with spaces",
        "<tool_call>\n<function=f>\n<parameter=first name>\nBo\n</parameter>\n</function>\n"
        "</tool_call>",
        calls=[("f", {"first name": "Bo"})],
    ),
    Case(
        "no end after a name",
        "<tool_call>\n<function=tide_now>\n",
        calls=[A_TIDE],
    ),
    Case(
        "a header twice",
        _FERRY.replace("<function=ferry_times>", "<function=ferry_times>\n" * 2),
        calls=[A_FERRY],
    ),
    Case(
        "a header and its end twice",
        _FERRY.replace("<f", "<function=ferry_times><f").replace("</function>", "</function>" * 2),
        calls=[A_FERRY],
    ),
    Case(
        "a header twice, and cut",
        "<tool_call>\n<function=tide_now>\n<function=tide_now>\n",
        cut=True,
    ),
    Case(
        "another header without an end before it",
        _FERRY.replace("<f", "<function=tide_now>\n<f"),
        calls=[A_TIDE, A_FERRY],
    ),
    Case("no opening tag", _FERRY.removeprefix("<tool_call>\n"), calls=[A_FERRY]),
    Case("no closing tag", _FERRY.removesuffix("\n</tool_call>"), calls=[A_FERRY]),
    Case("no </function>", _FERRY.replace("</function>\n", ""), calls=[A_FERRY]),
    Case("no </parameter>", _FERRY.replace("</parameter>\n", ""), calls=[A_FERRY]),
    Case(
        "no </parameter> between", _note("x").replace("</parameter>\n<", "<", 1), calls=_noted("x")
    ),
    Case(
        "no </function>, twice",
        f"{_FERRY}\n{_FERRY}".replace("</function>\n", ""),
        calls=[A_FERRY, A_FERRY],
    ),
    Case("no line breaks", _FERRY.replace("\n", ""), calls=[A_FERRY]),
    Case("a header left open", _FERRY.replace("times>", "times"), calls=[A_FERRY]),
    Case("a parameter's header left open", _FERRY.replace("harbour>", "harbour"), calls=[A_FERRY]),
    Case("a header left open in prose", "Say <function=f\nor so.", "Say <function=f\nor so."),
    Case(
        "unknown function",
        _FERRY.replace("ferry_times", "boats"),
        calls=[("boats", {"harbour": "Ærø"})],
    ),
    Case("JSON instead", FERRY, calls=[A_FERRY]),
    Case("cut in a value", _FERRY[:55], cut=True),
    Case("cut between values", _FERRY[:72], cut=True),
    Case("stopped between values", _FERRY[:72], calls=[A_FERRY]),
    Case("quoted", f"Write:\n```\n{_FERRY}\n```", f"Write:\n```\n{_FERRY}\n```"),
    Case("a tag in prose", "Use <function=name> here.", "Use <function=name> here."),
    Case("no tools offered", _FERRY, _FERRY, tools=[]),
]
