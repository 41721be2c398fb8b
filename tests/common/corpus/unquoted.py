"""Gemma 4, FunctionGemma, Llama, LFM2, Mistral, gpt-oss and the JSON blocks of others."""

from __future__ import annotations

from tests.common.corpus import Call, Case

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})


def _gemma(opening: str, fence: str, closing: str) -> list[Case]:
    ferry = f"{opening}call:ferry_times{{harbour:{fence}Ærø{fence}}}{closing}"
    tide = f"{opening}call:tide_now{{}}{closing}"
    return [
        Case("one", ferry, calls=[A_FERRY]),
        Case("two", f"Hm.\n{ferry}{tide}", "Hm.", calls=[A_FERRY, A_TIDE]),
        Case("two openings", opening + tide, calls=[A_TIDE]),
        Case("a space before the name", tide.replace("call:", "call: "), calls=[A_TIDE]),
        Case("only the name", tide.replace("call:", ""), calls=[A_TIDE]),
        Case(
            "values",
            f"{opening}call:book_cabin{{berths:9007199254740993,price:-2.5e1,pets:true,remark:null,"
            f"guests:[{fence}Bo{fence},{fence}}},{{{fence}],route:{{a:{{b:[]}}}}}}{closing}",
            calls=[
                (
                    "book_cabin",
                    {
                        "berths": 9007199254740993,
                        "price": -25.0,
                        "pets": True,
                        "remark": None,
                        "guests": ["Bo", "},{"],
                        "route": {"a": {"b": []}},
                    },
                )
            ],
        ),
        Case(
            "numbers between the delimiters of a string",
            f"{opening}call:book_cabin{{berths:{fence}42{fence},pets:{fence}true{fence},"
            f"price:{fence}two{fence},code:{fence}007{fence}}}{closing}",
            calls=[
                ("book_cabin", {"berths": 42, "pets": True, "price": "two", "code": "007"}),
            ],
        ),
        Case(
            "missing commas",
            f"{opening}call:book_cabin{{berths:42 code:{fence}a{fence}remark:b c pets:{fence}true"
            f"{fence} price:2}}{closing}",
            calls=[
                (
                    "book_cabin",
                    {"berths": 42, "code": "a", "remark": "b c", "pets": True, "price": 2},
                ),
            ],
        ),
        Case("a comma too many", f"{opening}call:tide_now{{,}}{closing}", calls=[A_TIDE]),
        Case(
            "bare words",
            f"{opening}call:f{{a:over there,b:2}}{closing}",
            calls=[("f", {"a": "over there", "b": 2})],
        ),
        Case(
            "spaces in keys",
            f"{opening}call:f{{first name:{fence}Bo{fence}, of : {{a b:1}}}}{closing}",
            calls=[("f", {"first name": "Bo", "of": {"a b": 1}})],
        ),
        Case(
            "nothing, half a number",
            f"{opening}call:f{{a:,b:2.}}{closing}",
            calls=[("f", {"a": "", "b": 2.0})],
        ),
        Case("JSON", f'{opening}call:f{{"a": "b\\"}}"}}{closing}', calls=[("f", {"a": 'b"}'})]),
        Case(
            "markers in a string",
            ferry.replace("Ærø", f'{opening} " {closing}\n'),
            calls=[("ferry_times", {"harbour": f'{opening} " {closing}\n'})],
        ),
        Case(
            "a call in a string",
            ferry.replace("Ærø", f"See {ferry}"),
            calls=[("ferry_times", {"harbour": f"See {ferry}"})],
        ),
        Case(
            "a colon at the end of a string",
            ferry.replace("Ærø", "Ærø:"),
            calls=[("ferry_times", {"harbour": "Ærø:"})],
        ),
        Case("cut in a key", f"{opening}call:ferry_times{{har", cut=True),
        Case("no closing", ferry.removesuffix(closing), calls=[A_FERRY]),
        Case("a brace too few", tide.replace("}", ""), tide.replace("}", "")),
        Case("not a call", f"{opening}tides{closing}", f"{opening}tides{closing}"),
        Case("cut", ferry[: len(opening) + 30], cut=True),
        Case("quoted", f"`{tide}`", f"`{tide}`"),
        Case("no tools", tide, tide, tools=[]),
    ]


FUNCTION_GEMMA = _gemma("<start_function_call>", "<escape>", "<end_function_call>")
GEMMA4_HEADER = "<|turn>model\n"
GEMMA4 = [
    *_gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    Case("reasoning", "<|channel>thought\nSo.\n<channel|>Hm.", "Hm.", "So."),
    Case("no reasoning", "<|channel>thought\n<channel|>Hm.", "Hm."),
    Case(
        "in the prompt",
        "So.<channel|>Hm.",
        "Hm.",
        "So.",
        tail=GEMMA4_HEADER + "<|channel>thought\n",
    ),
    Case(
        "closed in the prompt", "Hm.", "Hm.", tail=GEMMA4_HEADER + "<|channel>thought\n<channel|>"
    ),
    Case("reasoning again", "Hm.<|channel>thought\nSo.<channel|>Ah.", "Hm.Ah.", "So."),
    Case("left open", "<|channel>thought\nSo", "", "So", cut=True),
    Case("closed again", "<|channel>thought\n<channel|>Hm.<channel|>", "Hm."),
    Case("opened and closed", "Hm.<|channel>thought\n<channel|><channel|>", "Hm."),
    Case("closed in code", "Hm. `<channel|>`", "Hm. `<channel|>`"),
    Case(
        "JSON in the markers",
        '<|tool_call>{"name": "ferry_times", "arguments": {"harbour": "Ærø"}}<tool_call|>Hm.',
        "Hm.",
        calls=[A_FERRY],
    ),
    Case(
        "a Python call in the markers",
        "Hm.<|tool_call>call:ferry_times(harbour='Ærø')<tool_call|><|tool_call>call:tide_now()",
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("no braces", "<|tool_call>call:tide_now<tool_call|>Hm.", "Hm.", calls=[A_TIDE]),
    Case(
        "no braces, and arguments are missing",
        "<|tool_call>call:ferry_times<tool_call|>",
        "<|tool_call>call:ferry_times<tool_call|>",
    ),
    Case("only a colon", "<|tool_call>:tide_now{}<tool_call|>", calls=[("tide_now", {})]),
    Case("a nameless channel", "<|channel>So.<channel|>Hm.", "Hm.", "So."),
    Case("a channel for the answer", "<|channel>thought\nSo.<|channel>content\nHm.", "Hm.", "So."),
    Case(
        "no first delimiter",
        '<|tool_call>call:book_cabin{code:Ærø, 9 days<|"|>,berths:2,guests:[<|"|>Bo<|"|>,Al<|"|>]}'
        "<tool_call|>",
        calls=[("book_cabin", {"code": "Ærø, 9 days", "berths": 2, "guests": ["Bo", "Al"]})],
    ),
    Case("text that remains of a token", "<call>tide_now{}", calls=[A_TIDE]),
    Case("the first token twice", "<|channel><|channel>thought\n<channel|>Hm.", "Hm."),
    Case("no opening", "call:tide_now{}<tool_call|>", calls=[A_TIDE]),
    Case("no opening, on a line of its own", "Hm.\ncall:tide_now{}", "Hm.", calls=[A_TIDE]),
    Case("no opening, in a line", "Hm, call:tide_now{}", "Hm, call:tide_now{}"),
    Case("a colon too many", "<|tool_call>:call:tide_now{}<turn|>", calls=[A_TIDE]),
    Case("reasoning without its token", "thought\nSo.\n<channel|>Hm.", "Hm.", "So."),
]

_JSON_FERRY = '{"name": "ferry_times", "parameters": {"harbour": "Ærø"}}'
_JSON_TIDE = '{"name": "tide_now", "parameters": {}}'
LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA3 = [
    Case("one", _JSON_FERRY, calls=[A_FERRY]),
    Case(
        "custom tools' tags",
        'Hm.<function=ferry_times>{"harbour": "Ærø"}</function>\n<function=tide_now>{}</function>',
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("such a tag, cut", 'Hm.\n<function=ferry_times>{"harb', "Hm.", cut=True),
    Case("such a tag in a sentence", "Use <function=NAME> here.", "Use <function=NAME> here."),
    Case("a tag before", f"<|python_tag|>{_JSON_FERRY}", calls=[A_FERRY]),
    Case("two", f"{_JSON_FERRY}; {_JSON_TIDE}", calls=[A_FERRY, A_TIDE]),
    Case("two after a tag", f"<|python_tag|>{_JSON_FERRY};{_JSON_TIDE}", calls=[A_FERRY, A_TIDE]),
    Case("a brace too many", f"{_JSON_FERRY}}}", calls=[A_FERRY]),
    Case("Python's quotes", f"{_JSON_FERRY}".replace('"', "'"), calls=[A_FERRY]),
    Case("a list after a tag", f"<|python_tag|>[{_JSON_FERRY}]", calls=[A_FERRY]),
    Case(
        "text before, second one cut",
        f"Hm.\n{_JSON_TIDE}; {_JSON_FERRY[:45]}",
        "Hm.",
        calls=[A_TIDE],
        cut=True,
    ),
    Case("two lines", f"{_JSON_FERRY}\n{_JSON_TIDE}", calls=[A_FERRY, A_TIDE]),
    Case("inside text", f"See {_JSON_TIDE} there.", "See  there.", calls=[A_TIDE]),
    Case("a list", f"[{_JSON_FERRY}, {_JSON_TIDE}]", calls=[A_FERRY, A_TIDE]),
    Case("arguments", _JSON_FERRY.replace("parameters", "arguments"), calls=[A_FERRY]),
    Case("type", _JSON_TIDE.replace("{", '{"type": "function", ', 1), calls=[A_TIDE]),
    Case("an unknown name", _JSON_TIDE.replace("tide", "time"), calls=[("time_now", {})]),
    Case(
        "an unknown name in text",
        f"So {_JSON_TIDE.replace('tide', 'time')}",
        f"So {_JSON_TIDE.replace('tide', 'time')}",
    ),
    Case(
        "an answer in JSON",
        '{"name": "Bo", "parameters": 1, "x": []}',
        '{"name": "Bo", "parameters": 1, "x": []}',
    ),
    Case("no name", '{"parameters": {}}', '{"parameters": {}}'),
    Case("no arguments", '{"name": "tide_now"}', '{"name": "tide_now"}'),
    Case("quoted", f"So:\n```json\n{_JSON_TIDE}\n```", f"So:\n```json\n{_JSON_TIDE}\n```"),
    Case("only a code block", f"```json\n{_JSON_TIDE}\n```", calls=[A_TIDE]),
    Case("not a call after a tag", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Case("Python after a tag", "<|python_tag|>tide_now()", calls=[A_TIDE]),
    Case("as a built-in tool", "<|python_tag|>ferry_times.call(harbour='Ærø')", calls=[A_FERRY]),
    Case("cut", _JSON_FERRY[:45], cut=True),
    Case(
        "second one cut",
        f"{_JSON_TIDE}; {_JSON_FERRY[:45]}",
        calls=[A_TIDE],
        cut=True,
    ),
    Case("no tools", _JSON_TIDE, _JSON_TIDE, tools=[]),
]

_PY_FERRY = "ferry_times(harbour='Ærø')"


def _pythonic(opening: str, closing: str) -> list[Case]:
    def block(text: str) -> str:
        return f"{opening}[{text}]{closing}"

    return [
        Case("one", block(_PY_FERRY), calls=[A_FERRY]),
        Case("two", block(f"{_PY_FERRY}, tide_now()"), calls=[A_FERRY, A_TIDE]),
        Case(
            "values",
            block(
                "book_cabin(berths=9007199254740993, price=-1.5, pets=False, remark=None, "
                "guests=['Bo\\'s', \"a\\n\"], route={'a': (1, {})})"
            ),
            calls=[
                (
                    "book_cabin",
                    {
                        "berths": 9007199254740993,
                        "price": -1.5,
                        "pets": False,
                        "remark": None,
                        "guests": ["Bo's", "a\n"],
                        "route": {"a": [1, {}]},
                    },
                )
            ],
        ),
        Case(
            "by position after a name",
            block("ferry_times(harbour='Ærø', 'Mon')"),
            calls=[("ferry_times", {"harbour": "Ærø", "day": "Mon"})],
        ),
        Case("by position", block("ferry_times('Ærø')"), calls=[A_FERRY]),
        Case(
            "Python's other literals",
            block(
                "book_cabin(berths=0x1F, price=1_000.5, route={1: .5, None: 2.}, "
                """guests=[r"C:\\d", 'a' "b"\n 'c'])"""
            ),
            calls=[
                (
                    "book_cabin",
                    {
                        "berths": 31,
                        "price": 1000.5,
                        "route": {"1": 0.5, "null": 2.0},
                        "guests": ["C:\\d", "abc"],
                    },
                )
            ],
        ),
        Case(
            "expressions, which are strings of their source",
            block(
                "ferry_times(harbour=b'z', day=f(1, 'a)')[0] + 2), ferry_times(harbour=x.y, day=), "
                "book_cabin(guests=[f'{a}, b', (1 + 2) * 3], route={k: v for k in w}), tide_now()"
            ),
            calls=[
                ("ferry_times", {"harbour": "b'z'", "day": "f(1, 'a)')[0] + 2"}),
                ("ferry_times", {"harbour": "x.y", "day": ""}),
                (
                    "book_cabin",
                    {"guests": ["f'{a}, b'", "(1 + 2) * 3"], "route": {"k": "v for k in w"}},
                ),
                A_TIDE,
            ],
        ),
        Case(
            "a string with an operator or a method",
            block("ferry_times(harbour='a' + \"b\", day='c'.upper()), tide_now()"),
            calls=[("ferry_times", {"harbour": 'a\' + "b"', "day": "c'.upper()"}), A_TIDE],
        ),
        Case(
            "commas too many, and a value behind a list",
            block("book_cabin(guests=['Bo',, 'Al'][0],, pets=True, 1), tide_now()"),
            calls=[("book_cabin", {"guests": ["Bo", "Al"], "pets": True, "berths": 1}), A_TIDE],
        ),
        Case(
            "more values than arguments",
            block("tide_now(b'z', 'a'), tide_now()"),
            calls=[A_TIDE, A_TIDE],
        ),
        Case(
            "a call's bracket missing or too many, and a comma missing",
            block("tide_now()), ferry_times(harbour='Ærø'], day='Mon') tide_now(]"),
            calls=[A_TIDE, ("ferry_times", {"harbour": "Ærø", "day": "Mon"}), A_TIDE],
        ),
        Case(
            "quotes of code in a string of the same quotes",
            block("""save_note(path="print(len("abc"))", text='d['k']'), tide_now()"""),
            calls=[("save_note", {"path": 'print(len("abc"))', "text": "d['k']"}), A_TIDE],
        ),
        Case(
            "brackets in a string",
            block("ferry_times(harbour=')],(')"),
            calls=[("ferry_times", {"harbour": ")],("})],
        ),
        Case("text before", f"Hm.\n{block('tide_now()')}", "Hm.", calls=[A_TIDE]),
        Case("a list that is none", "[a](b) [tide_now] [1, 2]", "[a](b) [tide_now] [1, 2]"),
        Case("quoted", f"`{block('tide_now()')}`", f"`{block('tide_now()')}`"),
        Case("cut", (opening + "[" + _PY_FERRY)[:-3], cut=True),
        Case("no tools", block("tide_now()"), block("tide_now()"), tools=[]),
    ]


LLAMA4 = [
    *_pythonic("", ""),
    *_pythonic("<|python_start|>", "<|python_end|>"),
    Case("LFM2's marks", f"<|tool_call_start|>[{_PY_FERRY}]<|tool_call_end|>", calls=[A_FERRY]),
]
LFM2 = [
    *_pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    Case(
        "a bracket too few",
        f"<|tool_call_start|>[{_PY_FERRY}, tide_now()<|tool_call_end|>Hm.",
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case(
        "a bracket too many", f"<|tool_call_start|>[{_PY_FERRY}]]<|tool_call_end|>", calls=[A_FERRY]
    ),
    Case("an empty block", "Hm.<|tool_call_start|><|tool_call_end|>", "Hm."),
    Case("an empty list", "Hm.<|tool_call_start|>[]<|tool_call_end|>", "Hm."),
    Case(
        "quotes in a string of the same quotes",
        "<|tool_call_start|>[ferry_times(harbour='say 'Ahoy' in 'Ær' 'ø\\'')]<|tool_call_end|>",
        calls=[("ferry_times", {"harbour": "say 'Ahoy' in 'Ærø'"})],
    ),
    Case(
        "sets",
        "<|tool_call_start|>[ferry_times(harbour={'Ær', 'ø'}, day={(1,), 2}, at={'a': {3}})]"
        "<|tool_call_end|>",
        calls=[("ferry_times", {"harbour": ["Ær", "ø"], "day": [[1], 2], "at": {"a": [3]}})],
    ),
    Case(
        "zeros in front",
        "<|tool_call_start|>[ferry_times(harbour=[007, -08.5, 0, 0x07])]<|tool_call_end|>",
        calls=[("ferry_times", {"harbour": [7, -8.5, 0, 7]})],
    ),
    Case(
        "JSON, for which a system prompt may ask",
        f"<|tool_call_start|>[{_JSON_FERRY}, {_JSON_TIDE}]<|tool_call_end|>Hm.",
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
]

_NEW_FERRY, _NEW_TIDE = (
    '[TOOL_CALLS]ferry_times[ARGS]{"harbour": "Ærø"}',
    "[TOOL_CALLS]tide_now[ARGS]{}",
)
_OLD_FERRY = '{"name": "ferry_times", "arguments": {"harbour": "Ærø"}}'
_OLD_TIDE = '{"arguments": {}, "name": "tide_now"}'
MISTRAL_HEADER = "[/INST]"
MISTRAL = [
    Case("two openings", f"[TOOL_CALLS]{_NEW_TIDE}", calls=[A_TIDE]),
    Case(
        "nothing after the mark of arguments",
        f"[TOOL_CALLS]tide_now[ARGS]{_NEW_FERRY}[TOOL_CALLS]tide_now[ARGS]",
        calls=[A_TIDE, A_FERRY, A_TIDE],
    ),
    Case("cut after the mark of arguments", "[TOOL_CALLS]tide_now[ARGS]", cut=True),
    Case("only names", "[TOOL_CALLS]tide_now[TOOL_CALLS]tide_now", calls=[A_TIDE, A_TIDE]),
    Case("cut after a name", "[TOOL_CALLS]tide_now", cut=True),
    Case(
        "only the name of a tool with arguments", "[TOOL_CALLS]save_note", "[TOOL_CALLS]save_note"
    ),
    Case("only a name that was not offered", "[TOOL_CALLS]tide", "[TOOL_CALLS]tide"),
    Case(
        "objects with a comma",
        f"[TOOL_CALLS] {_OLD_FERRY}, {_OLD_TIDE}",
        calls=[A_FERRY, A_TIDE],
    ),
    Case(
        "an object after a call",
        f'[TOOL_CALLS] {_OLD_FERRY}, {{"a": 1}}',
        ', {"a": 1}',
        calls=[A_FERRY],
    ),
    Case("one", _NEW_FERRY, calls=[A_FERRY]),
    Case("two", f"Hm.{_NEW_FERRY}{_NEW_TIDE}", "Hm.", calls=[A_FERRY, A_TIDE]),
    Case("with an id", _NEW_TIDE.replace("[A", "[CALL_ID]a1B2c3D4e[A"), calls=[A_TIDE]),
    Case("no mark of arguments", _NEW_FERRY.replace("[ARGS]", ""), calls=[A_FERRY]),
    Case("a list", f"[TOOL_CALLS] [{_OLD_FERRY}, {_OLD_TIDE}]", calls=[A_FERRY, A_TIDE]),
    Case("reasoning", f"[THINK]So.[/THINK]{_NEW_TIDE}", "", "So.", [A_TIDE]),
    Case("older reasoning", "<think>\nSo.\n</think>\nHm.", "Hm.", "So."),
    Case("left open", "[THINK]So", "", "So", cut=True),
    Case("call inside reasoning", f"[THINK]So.{_NEW_TIDE}", "", "So.", [A_TIDE]),
    Case("quoted in reasoning", "[THINK]A `[TOOL_CALLS]`.[/THINK]Hm.", "Hm.", "A `[TOOL_CALLS]`."),
    Case(
        "one mark for two",
        _NEW_FERRY + _NEW_TIDE.removeprefix("[TOOL_CALLS]"),
        calls=[A_FERRY, A_TIDE],
    ),
    Case("no opening", _NEW_FERRY.removeprefix("[TOOL_CALLS]"), calls=[A_FERRY]),
    Case("a list without opening", f"[{_OLD_FERRY}]", calls=[A_FERRY]),
    Case(
        "markers in a string",
        _NEW_FERRY.replace("Ærø", "[TOOL_CALLS]x[ARGS]{"),
        calls=[("ferry_times", {"harbour": "[TOOL_CALLS]x[ARGS]{"})],
    ),
    Case("cut", _NEW_FERRY[:35], cut=True),
    Case(
        "a list cut",
        f"[TOOL_CALLS][{_OLD_TIDE}, {_OLD_FERRY[:40]}",
        calls=[A_TIDE],
        cut=True,
    ),
    Case("an opener at the end", "Hm.[TOOL_CALLS]", "Hm."),
    Case("an opener cut", "Hm.\n[TOO", "Hm.", cut=True),
    Case("a brace too many", _NEW_FERRY + "}", calls=[A_FERRY]),
    Case("an opener at the very end, cut", "Hm.\n[TOOL_CALLS] ", "Hm.", cut=True),
    Case("brackets in an answer", "[1] and [THIN] and [x](y)", "[1] and [THIN] and [x](y)"),
    Case("no tools", _NEW_TIDE, _NEW_TIDE, tools=[]),
]

HARMONY_HEADER = "<|start|>assistant"
_THOUGHT = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
_TO_FERRY = (
    '<|channel|>commentary to=functions.ferry_times <|constrain|>json<|message|>{"harbour": "Ærø"}'
)
_TO_TIDE = " to=functions.tide_now<|channel|>commentary<|message|>{}"
_BEAM_TIDE = " to=tide_now<|channel|>analysis <|constrain|>xml<|message|>"
_BEAM_CABIN = (
    " to=book_cabin<|channel|>analysis <|constrain|>xml<|message|>"
    '<rfl:parameter name="berths">\n2\n</rfl:parameter>'
    '<rfl:parameter name="remark">\nNo </rfl:parameter> window\n</rfl:parameter>'
)
_BEAM_NEXT = "<|end|><|start|>assistant"
A_CABIN: Call = ("book_cabin", {"berths": 2, "remark": "No </rfl:parameter> window"})
HARMONY = [
    Case(
        "recipient first, arguments in tags",
        f"<|channel|>analysis<|message|>So.{_BEAM_NEXT}{_BEAM_CABIN}{_BEAM_NEXT}{_BEAM_TIDE}<|call|>",
        "",
        "So.",
        [A_CABIN, A_TIDE],
    ),
    Case("recipient first, arguments in tags, no end", _BEAM_CABIN, calls=[A_CABIN]),
    Case(
        "recipient first, arguments in tags, one without its end",
        _BEAM_CABIN.replace("\n2\n</rfl:parameter>", "\n2\n") + "<|call|>",
        calls=[A_CABIN],
    ),
    Case("recipient first, arguments in tags, cut", _BEAM_CABIN[:-20], cut=True),
    Case(
        "recipient first, arguments in tags and an answer",
        f"{_BEAM_CABIN}{_BEAM_NEXT}<|channel|>final<|message|>Hm.<|return|>",
        "Hm.",
        calls=[A_CABIN],
    ),
    Case("another channel", "<|channel|>aside<|message|>Hm.<|end|>", "Hm."),
    Case(
        "a tool as the author",
        "<|channel|>final<|message|>Hm.<|end|><|start|>functions.tide_now to=assistant<|message|>9"
        "<|end|>",
        "Hm.9",
    ),
    Case(
        "another format",
        '<|channel|>final <|constrain|>JSON<|message|>{"a": 1}<|return|>',
        '{"a": 1}',
    ),
    Case("an answer", "<|channel|>final<|message|>Hm.\n", "Hm.\n"),
    Case("a marker cut at the beginning", "<|chan", cut=True),
    Case(
        "a marker cut in reasoning", _THOUGHT[: _THOUGHT.index("<|end|>") + 4], "", "So.", cut=True
    ),
    Case("a marker cut in an answer", "<|channel|>final<|message|>Hm.<|ret", "Hm.", cut=True),
    Case("a marker cut between messages", f"{_THOUGHT}<|sta", "", "So.", cut=True),
    Case("reasoning, answer", f"{_THOUGHT}<|channel|>final<|message|>Hm.", "Hm.", "So."),
    Case("reasoning, call", _THOUGHT + _TO_FERRY, "", "So.", [A_FERRY]),
    Case("recipient first", _THOUGHT + _TO_TIDE + "<|call|>", "", "So.", [A_TIDE]),
    Case("a recipient cut", " to=functions.tide_n", cut=True),
    Case("cut after a recipient", " to=functions.tide_now<|chan", cut=True),
    Case("two", f"{_TO_FERRY}<|call|><|start|>assistant{_TO_TIDE}", calls=[A_FERRY, A_TIDE]),
    Case(
        "preamble",
        f"<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant{_TO_TIDE}",
        "Hm.",
        "",
        [A_TIDE],
    ),
    Case(
        "call on the analysis channel", _TO_FERRY.replace("commentary", "analysis"), calls=[A_FERRY]
    ),
    Case(
        "reasoning begun in the prompt",
        "So.<|end|>",
        "",
        "So.",
        tail=f"{HARMONY_HEADER}<|channel|>analysis<|message|>",
    ),
    Case("reasoning left open", "<|channel|>analysis<|message|>So", "", "So", cut=True),
    Case("JSON as an answer", '<|channel|>final <|constrain|>json<|message|>{"a": 1}', '{"a": 1}'),
    Case("no header", "Hm.", "Hm."),
    Case("cut in the last marker", f"{_TO_FERRY}<|ca", calls=[A_FERRY], cut=True),
    Case(
        "a channel right after a call",
        f"{_TO_FERRY}<|channel|>final<|message|>Hm.",
        "Hm.",
        calls=[A_FERRY],
    ),
    Case(
        "a channel mentioned in reasoning",
        "<|channel|>analysis<|message|>Then <|channel|>final follows.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Hm.",
        "Hm.",
        "Then <|channel|>final follows.",
    ),
    Case(
        "markers in a string",
        _TO_FERRY.replace("Ærø", "<|end|><|call|>"),
        calls=[("ferry_times", {"harbour": "<|end|><|call|>"})],
    ),
    Case(
        "marker quoted in reasoning",
        "<|channel|>analysis<|message|>A `<|end|>`.<|end|>",
        "",
        "A `<|end|>`.",
    ),
    Case(
        "headers quoted in reasoning",
        "<|channel|>analysis<|message|>A `<|channel|>final<|message|>` and <|channel|> are "
        '"<|start|>assistant".<|end|>',
        "",
        'A `<|channel|>final<|message|>` and <|channel|> are "<|start|>assistant".',
    ),
    Case(
        "a tool of the model's own",
        '<|channel|>commentary to=python<|message|>{"code": "1"}<|call|>',
        calls=[("python", {"code": "1"})],
    ),
    Case(
        "code for a tool of the model's own",
        f"<|channel|>analysis to=python code<|message|>print(1)<|call|>{_THOUGHT[-18:]}{_TO_TIDE}",
        "",
        "print(1)",
        [A_TIDE],
    ),
    Case("to a person", "<|channel|>final to=user<|message|>{}", "{}"),
    Case(
        "cut in a recipient",
        f"{_THOUGHT}<|channel|>commentary to=functions.fer",
        "",
        "So.",
        cut=True,
    ),
    Case("stopped in a header", f"{_THOUGHT}<|channel|>commentary to=functions.fer", "", "So."),
    Case("no arguments", _TO_TIDE.replace("{}", "<|call|>"), calls=[A_TIDE]),
    Case(
        "a stray backtick in reasoning",
        "<|channel|>analysis<|message|>A ` b.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hm.",
        "Hm.",
        "A ` b.",
    ),
    Case("no arguments, and stopped", _TO_TIDE[:-2], calls=[A_TIDE]),
    Case("cut before the arguments", _TO_TIDE[:-2], cut=True),
    Case("no start", f"{_TO_FERRY}<|call|>assistant{_TO_TIDE}", calls=[A_FERRY, A_TIDE]),
    Case("no message", _TO_FERRY.replace("<|message|>", ""), calls=[A_FERRY]),
    Case("no message in reasoning", "<|channel|>analysisSo.<|end|>", "", "So."),
    Case("no channel", "analysis<|message|>So.<|end|>", "", "So."),
    Case("words of a header", "assistant code to=x", "assistant code to=x"),
    Case("no constrain", _TO_FERRY.replace("<|constrain|>", ""), calls=[A_FERRY]),
    Case("broken", _TO_TIDE.replace("{}", "{x}<|call|>"), _TO_TIDE.replace("{}", "{x}<|call|>")),
    Case("cut", _TO_FERRY[:-4], cut=True),
    Case("cut in a header", f"{_THOUGHT}<|channel|>fin", "", "So.", cut=True),
    Case("cut after a header's space", f"{_THOUGHT}<|channel|>commentary ", "", "So.", cut=True),
    Case("recipient first, after a line break", f"\n{_TO_TIDE}", calls=[A_TIDE]),
    Case("a brace too many", f"{_TO_TIDE}}}<|call|>", calls=[A_TIDE]),
    Case("no tools", _TO_TIDE, _TO_TIDE, tools=[]),
]

_LIST = '[{"name": "ferry_times", "arguments": {"harbour": "Ærø"}}, {"name": "tide_now"}]'
_BROKEN = (
    '[{"name": "ferry_times", "arguments": "x"}, {"name": "tide_now", "arguments": {}},'
    ' {"nam": [1, {"a": 2}]}, null, {"arguments": {}}, 5, "x",'
    ' {"name": "tide_now", "arguments": {}}]'
)
_TWICE = (
    '[{"name": "ferry_times",, "arguments": {{, harbour": "Ærø",}},,'
    ' {"name": "book_cabin", "arguments": {"guests": [,"Bo",, "Al"]}}, {"name": "tide_now", '
)
_LOOSE = (
    '[{"name": "ferry_times" "arguments": {harbour: Ærø, "day": }},'
    ' {"name": "book_cabin", "arguments": {"price": 1 + 1 "pets": true, "guests": ["Bo"}},'
    ' {"name": "save_note", "arguments": {"path": say.txt", "text": "say "hi" (or "ho") now."},'
    ' {"name": "tide_now", "arguments": {}]'
)
PHI4 = [
    Case("calls beside what is none", f"<|tool_call|>{_BROKEN}<|/tool_call|>", calls=[A_TIDE] * 2),
    Case(
        "functools with calls beside what is none",
        f"functools{_BROKEN}Hm.",
        "Hm.",
        calls=[A_TIDE] * 2,
    ),
    Case(
        "braces twice and commas too many",
        f"<|tool_call|>{_TWICE}<|/tool_call|>",
        calls=[
            ("ferry_times", {"harbour": "Ærø"}),
            ("book_cabin", {"guests": ["Bo", "Al"]}),
            A_TIDE,
        ],
    ),
    Case("nothing that is a call", "functools[5, {}]", "functools[5, {}]"),
    Case(
        "JSON without some quotes, commas and brackets",
        f"<|tool_call|>{_LOOSE}<|/tool_call|>",
        calls=[
            ("ferry_times", {"harbour": "Ærø", "day": None}),
            ("book_cabin", {"price": "1 + 1", "pets": True, "guests": ["Bo"]}),
            ("save_note", {"path": "say.txt", "text": 'say "hi" (or "ho") now.'}),
            A_TIDE,
        ],
    ),
    Case("a block", f"<|tool_call|>{_LIST}<|/tool_call|>", calls=[A_FERRY, A_TIDE]),
    Case("functools", f"functools{_LIST}", calls=[A_FERRY, A_TIDE]),
    Case("a bracket too many", f"<|tool_call|>{_LIST}]<|/tool_call|>", calls=[A_FERRY, A_TIDE]),
    Case(
        "a brace too many in a list",
        f"functools{_LIST.replace('}}', '}}}')}",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("reasoning", "<think>So.</think>Hm.", "Hm.", "So."),
    Case("functools, cut", f"Hm.\nfunctools{_LIST[:20]}", "Hm.", cut=True),
    Case("functools, the first cut", f"functools{_LIST[:3]}", cut=True),
    Case("a word", "functools is a module.", "functools is a module."),
    Case("a word, cut", "It is in functools", "It is in functools", cut=True),
    Case("a part of a word", "It is in func", "It is in func", cut=True),
    Case("no tools", f"functools{_LIST}", f"functools{_LIST}", tools=[]),
]
GRANITE = [
    Case("a list", f"<|tool_call|>{_LIST}", calls=[A_FERRY, A_TIDE]),
    Case("a block", f"<tool_call>{_OLD_FERRY}</tool_call>", calls=[A_FERRY]),
    Case("words of a marker, cut", "Hm. Here is my", "Hm. Here is my", cut=True),
    Case("a marker, cut", "Hm.\n<tool", "Hm.", cut=True),
    Case(
        "reasoning",
        "Here is my thought process: So.\n\nHere is my response:\nHm.",
        "Hm.",
        " So.",
    ),
]
