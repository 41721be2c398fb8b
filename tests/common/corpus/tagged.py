"""DSML, GLM, Longcat, MiniMax, MiniCPM and Kimi K3: arguments one by one between tags."""

from __future__ import annotations

from tests.common.corpus import Call, Case, tool

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})
_CABIN: Call = (
    "book_cabin",
    {
        "berths": 9007199254740993,
        "price": 2.5,
        "pets": True,
        "guests": ["Bo", {"x": None}],
        "route": {"via": "<b>"},
        "remark": None,
        "code": "007",
    },
)
_TEXTS = {
    "berths": "9007199254740993",
    "price": "2.5",
    "pets": "true",
    "guests": '["Bo", {"x": null}]',
    "route": '{"via": "<b>"}',
    "remark": "null",
    "code": "007",
}


def _dsml(mark: str, block: str) -> list[Case]:
    def call(name: str, *parameters: str) -> str:
        return f'<{mark}invoke name="{name}">\n' + "".join(parameters) + f"</{mark}invoke>"

    def parameter(key: str, value: str, text: bool = True) -> str:
        flag = str(text).lower()
        return f'<{mark}parameter name="{key}" string="{flag}">{value}</{mark}parameter>\n'

    def section(*calls: str) -> str:
        return f"<{mark}{block}>\n" + "\n".join(calls) + f"\n</{mark}{block}>"

    ferry, tide = call("ferry_times", parameter("harbour", "Ærø")), call("tide_now")
    thinking = "<｜Assistant｜><think>"
    note = parameter("text", "")
    return [
        Case("one", section(ferry), calls=[A_FERRY]),
        Case("two", f"Hm.\n\n{section(ferry, tide)}", "Hm.", calls=[A_FERRY, A_TIDE]),
        Case("reasoning", f"So.</think>\n\n{section(tide)}", "", "So.", [A_TIDE], thinking),
        Case("closes itself", section(f'<{mark}invoke name="tide_now"/>'), calls=[A_TIDE]),
        Case(
            "numbers marked as text",
            section(call("book_cabin", *(parameter(k, v) for k, v in _TEXTS.items()))),
            calls=[(_CABIN[0], {**_CABIN[1], "remark": "null"})],
        ),
        Case(
            "text where the schema has none",
            section(call("book_cabin", parameter("berths", "two"), parameter("pets", " true"))),
            calls=[("book_cabin", {"berths": "two", "pets": " true"})],
        ),
        Case(
            "types",
            section(call("book_cabin", *(parameter(k, v, k == "code") for k, v in _TEXTS.items()))),
            calls=[_CABIN],
        ),
        Case(
            "whitespace and markup",
            section(call("save_note", note.replace("></", f">\n a </{mark}parameter> \n<b>\n</"))),
            calls=[("save_note", {"text": f"\n a </{mark}parameter> \n<b>\n"})],
        ),
        Case(
            "a call in a value",
            section(call("save_note", note.replace("></", f">{section(ferry)}</"))),
            calls=[("save_note", {"text": section(ferry)})],
        ),
        Case(
            "quotes in a key",
            section(call("f", parameter('a "b"', "c"))),
            calls=[("f", {'a "b"': "c"})],
        ),
        Case("no section", ferry, calls=[A_FERRY]),
        Case("no end", section(ferry).removesuffix(f"\n</{mark}{block}>"), calls=[A_FERRY]),
        Case(
            "no end of the call", section(ferry.removesuffix(f"</{mark}invoke>")), calls=[A_FERRY]
        ),
        Case(
            "no end of a parameter",
            section(ferry.replace(f"</{mark}parameter>", "")),
            calls=[A_FERRY],
        ),
        Case(
            "all arguments in one",
            section(call("ferry_times", parameter("arguments", '{"harbour": "Ærø"}', False))),
            calls=[A_FERRY],
        ),
        Case(
            "a header twice",
            section(ferry.replace("<", f'<{mark}invoke name="ferry_times">\n<', 1)),
            calls=[A_FERRY],
        ),
        Case("JSON inside", section(call("ferry_times", '{"harbour": "Ærø"}\n')), calls=[A_FERRY]),
        Case("cut", section(ferry)[:-45], cut=True),
        Case("no tools", section(tide), section(tide), tools=[]),
        Case("quoted", f"```\n{section(tide)}\n```", f"```\n{section(tide)}\n```"),
    ]


DSML_V32 = _dsml("｜DSML｜", "function_calls")
DSML_V4 = [
    *_dsml("｜DSML｜", "tool_calls"),
    *(
        Case(
            f"a misspelt block, {block}",
            f'Hm.\n<｜DSML｜{block}>\n<｜DSML｜invoke name="tide_now">\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>",
            "Hm.",
            calls=[A_TIDE],
        )
        for block in ("toolcalls", "tool")
    ),
    Case("such a block's name", "A <｜DSML｜tool> here", "A <｜DSML｜tool> here"),
]
DSML_V41 = _dsml("｜DSML｜ ", "calls")

GLM_HEADER = "<|assistant|>"


def _glm(prefix: str, think: str, gap: str) -> list[Case]:
    def call(name: str, **values: str) -> str:
        pairs = "".join(
            f"<{prefix}arg_key>{key}</{prefix}arg_key>{gap}"
            f"<{prefix}arg_value>{value}</{prefix}arg_value>{gap}"
            for key, value in values.items()
        )
        return f"<{prefix}tool_call>{name}{gap}{pairs}</{prefix}tool_call>"

    ferry, tide = call("ferry_times", harbour="Ærø"), call("tide_now")
    closing = f"</{prefix}tool_call>"
    return [
        Case("line breaks around a key", ferry.replace("harbour", "\nharbour\n"), calls=[A_FERRY]),
        Case(
            "a call in Python's form",
            tide.replace("tide_now", "tide_now(day=1)"),
            tide.replace("tide_now", "tide_now(day=1)"),
        ),
        Case("one", ferry, calls=[A_FERRY]),
        Case("two", f"\nHm.\n{ferry}\n{tide}", "Hm.", calls=[A_FERRY, A_TIDE]),
        Case("reasoning", f"\n<{think}>So.</{think}>\n{tide}", "", "So.", [A_TIDE]),
        Case("reasoning, answer", f"<{think}>So.</{think}>\nHm.", "Hm.", "So."),
        Case("in the prompt", f"So.</{think}>Hm.", "Hm.", "So.", tail=f"{GLM_HEADER}<{think}>"),
        Case("not thinking", f"{tide}", "", "", [A_TIDE], f"{GLM_HEADER}</{think}>"),
        Case("types", call("book_cabin", **_TEXTS), calls=[_CABIN]),
        Case(
            "whitespace, markup and looks",
            call("save_note", path=" 12 ", text=f"\n {closing} </{prefix}arg_value> \n"),
            calls=[
                ("save_note", {"path": " 12 ", "text": f"\n {closing} </{prefix}arg_value> \n"})
            ],
        ),
        Case(
            "a call in a value",
            call("save_note", text=ferry),
            calls=[("save_note", {"text": ferry})],
        ),
        Case(
            "a value in quotes, which are a part of it",
            call("save_note", path='"a \\"b\\""', text='"a" or "b"'),
            calls=[("save_note", {"path": '"a \\"b\\""', "text": '"a" or "b"'})],
        ),
        Case(
            "pairs without tags",
            f"<{prefix}tool_call>book_cabin berths=2 pets=true code='0 7' remark=b c{closing}",
            calls=[("book_cabin", {"berths": 2, "pets": True, "code": "0 7", "remark": "b c"})],
        ),
        Case(
            "words that are no pairs",
            f"<{prefix}tool_call>book_cabin berths= 2 'x'{closing}",
            f"<{prefix}tool_call>book_cabin berths= 2 'x'{closing}",
        ),
        Case("a stray closing marker", f"Hm.\n{closing}\n", "Hm."),
        Case(
            "a closing marker in a line", f"It is {closing}, I think.", f"It is {closing}, I think."
        ),
        Case("unknown", call("boats", n="12", s="x"), calls=[("boats", {"n": 12, "s": "x"})]),
        Case("no closing tag", ferry.removesuffix(closing), calls=[A_FERRY]),
        Case("no closing tag, twice", ferry.removesuffix(closing) + tide, calls=[A_FERRY, A_TIDE]),
        Case("a header twice", f"<{prefix}tool_call>ferry_times{gap}{ferry}", calls=[A_FERRY]),
        Case("no opening tag", ferry.removeprefix(f"<{prefix}tool_call>"), calls=[A_FERRY]),
        Case(
            "JSON",
            f'<{prefix}tool_call>{{"name": "tide_now", "arguments": {{}}}}{closing}',
            calls=[A_TIDE],
        ),
        Case("no mark of a value", ferry.replace(f"<{prefix}arg_value>", ""), calls=[A_FERRY]),
        Case("a tool's name in an answer", "tide_now says so.", "tide_now says so."),
        Case("prose", f"The <{prefix}tool_call> tag.", f"The <{prefix}tool_call> tag."),
        Case("cut", ferry[:-30], cut=True),
        Case("cut after the name", f"<{prefix}tool_call>tide_now", f"<{prefix}tool_call>tide_now"),
        Case("no tools", tide, tide, tools=[]),
    ]


GLM_LINES = _glm("", "think", "\n")
GLM_INLINE = [
    *_glm("", "think", ""),
    Case("boxes", "It is\n<|begin_of_box|>nine<|end_of_box|>.<|role_end|>", "It is\nnine."),
    Case("JSON without opening", '{"name": "tide_now", "arguments": {}}', calls=[("tide_now", {})]),
    Case(
        "a tool named like a part of the mark",
        "Hm.<tool_call>call</tool_call>",
        "Hm.",
        calls=[("call", {})],
        tools=[tool("call")],
    ),
    Case(
        "JSON, the second without opening",
        '<tool_call>{"name": "tide_now"}</tool_call>{"name": "tide_now"}</tool_call>',
        calls=[("tide_now", {}), ("tide_now", {})],
    ),
    Case(
        "no end of the first",
        '<tool_call>tide_now\n{"a": 1}\n<tool_call>tide_now\n{"a": 2}</tool_call>',
        calls=[("tide_now", {"a": 1}), ("tide_now", {"a": 2})],
    ),
    Case(
        "a part of the end",
        "<tool_call>save_note<arg_key>path</arg_key><arg_value>a</arg_value></tool_",
        calls=[("save_note", {"path": "a"})],
    ),
    Case(
        "line breaks written as escapes",
        r"<tool_call>save_note\n<arg_key>path</arg_key>\n<arg_value>a\nb</arg_value>\n"
        r"<arg_key>text</arg_key>\n<arg_value>c</arg_value>\n</tool_call>",
        calls=[("save_note", {"path": r"a\nb", "text": "c"})],
    ),
]
LONGCAT = _glm("longcat_", "longcat_think", "\n")

_M2 = (
    '<minimax:tool_call>\n<invoke name="ferry_times">\n<parameter name="harbour">Ærø</parameter>\n'
)
_M2 += "</invoke>\n</minimax:tool_call>"
_M2_TIDE = '</invoke>\n<invoke name="tide_now"></invoke>'
MINIMAX = [
    Case(
        "text before the end of the block",
        _M2.replace("</invoke>\n", "</invoke>Hm."),
        "Hm.",
        calls=[A_FERRY],
    ),
    Case(
        "calls of MiniMax M1",
        '<tool_calls>\n{"name": "ferry_times", "arguments": {"harbour": "Ærø"}}\n'
        '{"name": "tide_now", "arguments": {}}\n</tool_calls>',
        calls=[A_FERRY, A_TIDE],
    ),
    Case("an end too many", "So.</think>Hm.</think> Ah.", "Hm. Ah.", "So.", tail="<think>\n"),
    Case("one", _M2, calls=[A_FERRY]),
    Case("reasoning", f"So.\n</think>\n\n{_M2}", "", "So.", [A_FERRY], "]~b]ai\n<think>\n"),
    Case("reasoning, answer", "<think>So.</think>\n\nHm.", "Hm.", "So."),
    Case("two in a block", _M2.replace("</invoke>", _M2_TIDE), calls=[A_FERRY, A_TIDE]),
    Case("single quotes", _M2.replace('"', "'"), calls=[A_FERRY]),
    Case(
        "a line break at the end of a value",
        _M2.replace("Ærø", "Ærø\n"),
        calls=[("ferry_times", {"harbour": "Ærø\n"})],
    ),
    Case("a value on lines of its own", _M2.replace("Ærø", "\nÆrø\n"), calls=[A_FERRY]),
    Case(
        "a header twice",
        _M2.replace("<inv", '<invoke name="ferry_times"><inv', 1),
        calls=[A_FERRY],
    ),
    Case("no block", _M2[20:-21], calls=[A_FERRY]),
    Case("no end of the block", _M2[:-21], calls=[A_FERRY]),
    Case("no end of a parameter", _M2.replace("</parameter>", ""), calls=[A_FERRY]),
    Case(
        "no end of a parameter, whose value ends with line breaks",
        _M2.replace("Ærø</parameter>", "\nÆrø\n\n"),
        calls=[("ferry_times", {"harbour": "Ærø\n"})],
    ),
    Case("cut", _M2[:70], cut=True),
    Case("prose", "Say <invoke> or so.", "Say <invoke> or so."),
    Case("no tools", _M2, _M2, tools=[]),
]  # fmt: skip

_CPM = '<function name="ferry_times"><param name="harbour">Ærø</param></function>'
MINICPM = [
    Case("one", _CPM, calls=[A_FERRY]),
    Case(
        "two", f'Hm.\n{_CPM}<function name="tide_now"></function>', "Hm.", calls=[A_FERRY, A_TIDE]
    ),
    Case(
        "wrapped text",
        '<function name="save_note"><param name="text">'
        "<![CDATA[<b>\n]] & </param>]]></param></function>",
        calls=[("save_note", {"text": "<b>\n]] & </param>"})],
    ),
    Case(
        "wrapped text without an end",
        '<function name="save_note"><param name="text"><![CDATA[<b> </param>]></param></function>',
        calls=[("save_note", {"text": "<b> </param>]>"})],
    ),
    Case(
        "all in one parameter",
        '<function name="ferry_times"><param name="properties">'
        "{'harbour': 'Ærø'}</param></function>",
        calls=[A_FERRY],
    ),
    Case("lines around a value", _CPM.replace("Ærø", "\nÆrø\n"), calls=[A_FERRY]),
    Case(
        "lines around wrapped text",
        _CPM.replace("Ærø", "\n<![CDATA[\nÆrø\n]]>\n"),
        calls=[("ferry_times", {"harbour": "\nÆrø\n"})],
    ),
    Case("reasoning", f"<think>\nSo.\n</think>\n{_CPM}", "", "So.", [A_FERRY]),
    Case("no end", _CPM.removesuffix("</function>"), calls=[A_FERRY]),
    Case("cut", _CPM[:50], cut=True),
    Case("no tools", _CPM, _CPM, tools=[]),
]

K3_HEADER = '<|open|>message role="assistant"<|sep|>'


def _k3(name: str, *arguments: tuple[str, str, str]) -> str:
    inside = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


_K3_FERRY = _k3("ferry_times", ("harbour", "string", "Ærø"))
_K3_END = "<|close|>tools<|sep|><|close|>message<|sep|>"
_RESPONSE = "<|open|>response<|sep|>Hm.<|close|>response<|sep|>"
KIMI_K3 = [
    Case("one", f"<|open|>tools<|sep|>{_K3_FERRY}{_K3_END}", calls=[A_FERRY]),
    Case(
        "all of it",
        f"So.<|close|>think<|sep|>{_RESPONSE}<|open|>tools<|sep|>{_K3_FERRY}{_k3('tide_now')}{_K3_END}",
        "Hm.",
        "So.",
        [A_FERRY, A_TIDE],
        K3_HEADER + "<|open|>think<|sep|>",
    ),
    Case("an answer", f"{_RESPONSE}<|close|>message<|sep|>", "Hm."),
    Case(
        "an answer without the thinking that the prompt opened",
        f"{_RESPONSE}<|close|>message<|sep|>",
        "Hm.",
        tail=K3_HEADER + "<|open|>think<|sep|>",
    ),
    Case(
        "answer opened in the prompt",
        _RESPONSE[23:],
        "Hm.",
        tail=K3_HEADER + "<|open|>response<|sep|>",
    ),
    Case("thinking", "So", "", "So", tail=K3_HEADER + "<|open|>think<|sep|>", cut=True),
    Case(
        "types and escapes",
        "<|open|>tools<|sep|>"
        + _k3(
            "f",
            ("a&amp;b &quot;c&quot;", "string", " 1\n"),
            ("n", "number", "1.50"),
            ("o", "object", '{"x": []}'),
        )
        + _K3_END,
        calls=[("f", {'a&b "c"': " 1\n", "n": 1.5, "o": {"x": []}})],
    ),
    Case(
        "one object",
        '<|open|>tools<|sep|><|open|>call tool="ferry_times" index="1"<|sep|>'
        '<|open|>json type="object"<|sep|>{"harbour": "Ærø"}<|close|>json<|sep|>'
        f"<|close|>call<|sep|>{_K3_END}",
        calls=[A_FERRY],
    ),
    Case("no section", _K3_FERRY, calls=[A_FERRY]),
    Case("no end", f"<|open|>tools<|sep|>{_K3_FERRY}", calls=[A_FERRY]),
    Case("cut", _K3_FERRY[:-40], cut=True),
    Case("no tools", _K3_FERRY, _K3_FERRY, tools=[]),
]

GLIMMER_HEADER = "<|start|>user<|message|>Hm?<|eot|><|start|>assistant"
_ATEM = (
    '<atem:function_calls>\n<atem:invoke name="ferry_times">\n<atem:parameter name="harbour">Ærø'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
)
_NEXT = "<|eom|><|start|>assistant"
_TO_FERRY = f" to=ferry_times<|message|>{_ATEM}"
GLIMMER = [
    Case("a call to the user", f" to=user<|message|>{_ATEM}<|eot|>", calls=[A_FERRY]),
    Case(
        "a call to nobody",
        f"<|message|>{_ATEM}{_NEXT} to=user<|message|>Hm.",
        "Hm.",
        calls=[A_FERRY],
    ),
    Case("an answer", " to=user<|message|>Hm.<|eot|>", "Hm."),
    Case("a call", _TO_FERRY, calls=[A_FERRY]),
    Case(
        "thinking",
        f" to=self<|message|>So.{_NEXT} to=user<|message|>Hm.<|eot|>",
        "Hm.",
        "So.",
    ),
    Case(
        "thinking and a call",
        f" to=self<|message|>So.{_NEXT}{_TO_FERRY}<|eot|>",
        "",
        "So.",
        [A_FERRY],
    ),
    Case(
        "an answer and two calls",
        f" to=user<|message|>Hm.{_NEXT}{_TO_FERRY}{_NEXT}{_TO_FERRY}<|eot|>",
        "Hm.",
        calls=[A_FERRY, A_FERRY],
    ),
    Case(
        "a call quoted in an answer",
        f" to=user<|message|>Write this:\n{_ATEM}<|eot|>",
        f"Write this:\n{_ATEM}",
    ),
    Case(
        "a call quoted in reasoning",
        f" to=self<|message|>I could write {_ATEM} here{_NEXT} to=user<|message|>Hm.",
        "Hm.",
        f"I could write {_ATEM} here",
    ),
    Case(
        "the name twice",
        _TO_FERRY.replace('"ferry_times"', '"ferry_times.ferry_times"'),
        calls=[A_FERRY],
    ),
    Case("a recipient in prose", " to=user<|message|>Send it to=Bo.", "Send it to=Bo."),
    Case("thinking, cut", " to=self<|message|>So", "", "So", cut=True),
    Case("a call, cut", _TO_FERRY[:90], cut=True),
]
