"""Mistakes of models that their users reported: names, delimiters and brackets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.common.corpus import Call, Case, tool

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})
_OBJECT = '{"name": "ferry_times", "arguments": {"harbour": "Ærø"}}'


def _prefixed(call: Callable[[str], str]) -> list[Case]:
    """call: writes a call of the ferries with this name."""
    names = [
        *("google:mcp:boats:ferry_times", "ferry_times:ferry_times", "default_api:ferry_times"),
        *("default_api.ferry_times", "functions:ferry_times", "functions.ferry_times"),
        *("mcp.boats:ferry_times", "ferry_times.ferry_times"),
    ]
    return [Case(f"the name {name}", call(name), calls=[A_FERRY]) for name in names]


_MINE = tool("boats:ferry_times")
NAMES_JSON = [
    *_prefixed(lambda name: f"<tool_call>{_OBJECT.replace('ferry_times', name)}</tool_call>"),
    Case(
        "an offered name with a prefix",
        '<tool_call>{"name": "boats:ferry_times", "arguments": {}}</tool_call>',
        calls=[("boats:ferry_times", {})],
        tools=[_MINE, tool("ferry_times")],
    ),
    Case(
        "a comma between blocks",
        f'<tool_call>{_OBJECT}</tool_call>, <tool_call>{{"name": "tide_now"}}</tool_call>',
        calls=[A_FERRY, A_TIDE],
    ),
    Case(
        "a function in the object",
        f'<tool_call>{{"type": "function", "function": {_OBJECT}}}</tool_call>',
        calls=[A_FERRY],
    ),
    Case(
        "names as keys",
        '<tool_call>{"ferry_times": {"harbour": "Ærø"}, "tide_now": {}}</tool_call>',
        calls=[A_FERRY, A_TIDE],
    ),
    Case(
        "another name with words before it",
        '<tool_call>{"name": "the api:tide_now", "arguments": {}}</tool_call>',
        calls=[("the api:tide_now", {})],
    ),
    *(
        Case(
            f"markup in the name {name}",
            f"<tool_call>{_OBJECT.replace('ferry_times', name)}</tool_call>",
            calls=[A_FERRY],
        )
        for name in (
            "ferry_times<|channel|>commentary",
            "<|tool_call>ferry_times",
            "ferry_times</function",
            "`ferry_times`",
            " ferry_times ",
        )
    ),
]
NAMES_XML = _prefixed(
    lambda name: (
        f"<tool_call>\n<function={name}>\n<parameter=harbour>\nÆrø\n</parameter>\n</function>\n"
        "</tool_call>"
    )
)
NAMES_PYTHON = _prefixed(lambda name: f"[{name}(harbour='Ærø')]")
NAMES_GLM = _prefixed(
    lambda name: (
        f"<tool_call>{name}\n<arg_key>harbour</arg_key>\n<arg_value>Ærø</arg_value>\n</tool_call>"
    )
)


def _gemma(inside: str, name: str = "save_note") -> str:
    return f"<|tool_call>call:{name}{{{inside}}}<tool_call|>"


def _values(why: str, inside: str, **arguments: Any) -> Case:
    return Case(why, _gemma(inside), calls=[("save_note", arguments)])


_Q = '<|"|>'
GEMMA = [
    *_prefixed(lambda name: _gemma(f"harbour:{_Q}Ærø{_Q}", name)),
    Case(
        "a prefix and no opening",
        f"mcp.boats:ferry_times{{harbour:{_Q}Ærø{_Q}}}",
        f"mcp.boats:ferry_times{{harbour:{_Q}Ærø{_Q}}}",
    ),
    *(
        Case(
            f"the name {name}",
            f"<|tool_call>call:{name}{{harbour:{_Q}Ærø{_Q}}}<tool_call|>",
            calls=[A_FERRY],
        )
        for name in (
            '"ferry_times"',
            "`ferry_times`",
            f"{_Q}ferry_times{_Q}",
            "<|tool_call>ferry_times",
        )
    ),
    _values("single quotes", "text:'abc',path:'b'", text="abc", path="b"),
    _values("a pattern", r"text:':\s*\bw+',path:'b'", text=r":\s*\bw+", path="b"),
    _values("markup in single quotes", "text:'It is, {b: 1}, [c]'", text="It is, {b: 1}, [c]"),
    _values("an apostrophe", "text:'It's, well, Bo's',path:'b'", text="It's, well, Bo's", path="b"),
    _values("an escaped apostrophe", r"text:'It\'s'", text="It's"),
    _values("single quotes in a list", "text:['a, b','c']", text=["a, b", "c"]),
    _values("a delimiter after single quotes", f"text:'abc'{_Q}", text="abc"),
    _values("a delimiter after double quotes", f'text:"abc"{_Q},path:1', text="abc", path=1),
    _values("one apostrophe", "text:'abc", text="'abc"),
    _values("backticks", "text:`if (a) { b, 'c' }`,path:`d`", text="if (a) { b, 'c' }", path="d"),
    _values("equals signs", "text='a, b',path=\"c\"", text="a, b", path="c"),
    _values("an equals sign later", f"text:{_Q}a{_Q},path=['b']", text="a", path=["b"]),
    _values("no last delimiter", f"text:{_Q}ls", text="ls"),
    _values("no last delimiter, after another", f"path:{_Q}b{_Q},text:{_Q}ls", path="b", text="ls"),
    _values("no last delimiter, brackets", f"text:{_Q}f() {{ [1] }}", text="f() { [1] }"),
    _values("no delimiter before a key", f"text:{_Q}a }}],path:{_Q}b{_Q}", text="a }]", path="b"),
    _values("no delimiters", "text:\n\n# A, b: {c}\n", text="\n\n# A, b: {c}\n"),
    _values("no delimiters, a comma", "text:Hello, world,path:b", text="Hello, world", path="b"),
    Case(
        "no last delimiter before a number",
        _gemma(f"code:{_Q}ls,berths:3", "book_cabin"),
        calls=[("book_cabin", {"code": "ls", "berths": 3})],
    ),
    _values(
        "quotes as delimiters",
        f"text:{_Q}f({_Q}{_Q}{_Q} a {_Q}{_Q}{_Q}).b(){_Q},path:[{_Q}c{_Q}]",
        text='f(""" a """).b()',
        path=["c"],
    ),
    Case(
        "no last delimiter, and another call",
        _gemma(f"text:{_Q}ls") + _gemma(f"harbour:{_Q}Ærø{_Q}", "ferry_times"),
        calls=[("save_note", {"text": "ls"}), A_FERRY],
    ),
    Case(
        "no last delimiter and no end",
        f"<|tool_call>call:save_note{{text:{_Q}ls}}",
        calls=[("save_note", {"text": "ls"})],
    ),
    Case(
        "no delimiters and no end",
        "call:save_note{text:\n\n# A's (b).\n\nc: `d/` `e`.",
        calls=[("save_note", {"text": "\n\n# A's (b).\n\nc: `d/` `e`."})],
    ),
    Case("only a name and braces", "Hm.\nferry_times{harbour:'Ærø'}", "Hm.", calls=[A_FERRY]),
    Case("a name and braces in a line", "See ferry_times{a:1}.", "See ferry_times{a:1}."),
    Case("no delimiters, cut", "call:save_note{text:\n\n# A's (b).\n\nc", cut=True),
    Case(
        "a number, and no end",
        "<|tool_call>call:book_cabin{berths:1",
        "<|tool_call>call:book_cabin{berths:1",
        calls=[("book_cabin", '{"berths": ')],
    ),
    *(
        Case(
            f"the marks {opening} {closing}",
            f"Hm.\n{opening}call:tide_now{{}}{closing}",
            "Hm.",
            calls=[A_TIDE],
        )
        for opening, closing in (
            ("<tool_call>", "</tool_call>"),
            ("<|tool_call|>", "<|tool_call|>"),
            ("<|tool_call>", "<|/tool_call|>"),
            ("tool_call>", "<tool_call|>"),
            ("|tool_call>", ""),
        )
    ),
]
_CODE = "ferry_times(harbour='Ærø')"
TOOL_CODE = [
    Case("a block", f"```tool_code\n{_CODE}\n```", calls=[A_FERRY]),
    Case("text before", f"Hm.\n```tool_code\n{_CODE}\n```\nSo.", "Hm.\nSo.", calls=[A_FERRY]),
    Case("two", f"```tool_code\n{_CODE}\ntide_now()\n```", calls=[A_FERRY, A_TIDE]),
    Case(
        "printed",
        f"```tool_code\nprint(default_api.{_CODE})\nprint(tide_now())\n```",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("assigned", f"tool_code = {_CODE}\nprint(tool_code)", calls=[A_FERRY]),
    Case(
        "assigned in a block",
        f"```tool_code\nboats = {_CODE}\nprint(boats)\n```",
        calls=[A_FERRY],
    ),
    Case("its name alone", f"tool_code\n{_CODE}", calls=[A_FERRY]),
    Case("tags", f"<tool_code>\n{_CODE}\n</tool_code>", calls=[A_FERRY]),
    Case("no end", f"```tool_code\n{_CODE}", calls=[A_FERRY]),
    Case("cut", "```tool_code\nferry_times(harb", cut=True),
    Case("other code", "```tool_code\nf(1)\n```", "```tool_code\nf(1)\n```"),
    Case("Python", f"```python\n{_CODE}\n```", f"```python\n{_CODE}\n```"),
    Case("the word", "tool_code blocks are code.", "tool_code blocks are code."),
]
_XML = "<parameter=harbour>\nÆrø\n</parameter>\n</function>"


def _block(inside: str) -> str:
    return f"<tool_call>\n<function=ferry_times>\n{inside}\n</tool_call>"


_ELEMENTS = '<name>ferry_times</name><arguments>{"harbour": "Ærø"}</arguments>'
QWEN = [
    *(
        Case(f"a call as text: {text}", f"<tool_call>\n{text}\n</tool_call>", calls=[A_FERRY])
        for text in (
            _CODE,
            f"[{_CODE}]",
            'ferry_times{"harbour": "Ærø"}',
            'ferry_times\n{"harbour": "Ærø"}',
            f"functions:{_CODE}",
        )
    ),
    Case(
        "two calls as text", f"<tool_call>{_CODE}, tide_now()</tool_call>", calls=[A_FERRY, A_TIDE]
    ),
    *(
        Case(f"the marks {opening} {closing}", f"{opening}\n{_OBJECT}\n{closing}", calls=[A_FERRY])
        for opening, closing in (
            ("<tool_call>", "<tool_call|>"),
            ("<tool_call>", "<|/tool_call|>"),
            ("<|tool_call>", "<tool_call|>"),
            ("<|tool_call|>", "<|tool_call|>"),
            ("tool_call>", "</tool_call>"),
        )
    ),
    Case("elements", f"<function>{_ELEMENTS}</function>", calls=[A_FERRY]),
    Case(
        "elements in a block",
        f"Hm.\n<tool_call>\n<function>\n{_ELEMENTS}\n</function>\n</tool_call>",
        "Hm.",
        calls=[A_FERRY],
    ),
    Case("elements without a function", f"<tool_call>\n{_ELEMENTS}\n</tool_call>", calls=[A_FERRY]),
    Case(
        "elements of something else",
        "<function><b>f</b></function>",
        "<function><b>f</b></function>",
    ),
    *(
        Case(f"brackets: {text}", text, calls=[A_FERRY])
        for text in (
            f"<tool_call>\n<function=ferry_times{_XML}\n</tool_call>",
            f"<tool_call>\nfunction=ferry_times>{_XML}\n</tool_call>",
            f"function=ferry_times>{_XML}",
            _block(_XML[:-1]),
            _block(_XML.replace("/parameter>", "/parameter")),
            _block(_XML.replace("harbour>", "harbour")),
        )
    ),
    Case("an equation", "function=f> 1", "function=f> 1"),
    Case(
        "CRLF",
        _block(_XML).replace("\n", "\r\n"),
        calls=[A_FERRY],
    ),
    Case(
        "CRLF in a value",
        "<tool_call>\r\n<function=save_note>\r\n<parameter=text>\r\na\r\n\r\nb\r\n\r\n</parameter>\r\n"
        "</function>\r\n</tool_call>",
        calls=[("save_note", {"text": "a\r\n\r\nb\r\n"})],
    ),
    Case(
        "CRLF around blocks",
        f"Hm.\r\n<tool_call>\r\n{_OBJECT}\r\n</tool_call>\r\n",
        "Hm.",
        calls=[A_FERRY],
    ),
    Case(
        "CRLF after reasoning",
        "<think>\r\nSo.\r\n</think>\r\n\r\nHm.\r\nYes.",
        "Hm.\r\nYes.",
        "So.",
    ),
]
MISTRAL = [
    Case("a call as text", f"[TOOL_CALLS]{_CODE}", calls=[A_FERRY]),
    Case("a list as text", f"[TOOL_CALLS][{_CODE}, tide_now()]", calls=[A_FERRY, A_TIDE]),
]
GRANITE = [Case("a call as text", f"<|tool_call|>[{_CODE}]", calls=[A_FERRY])]
GLM = [
    Case("a call as text", f"<tool_call>{_CODE}</tool_call>", calls=[A_FERRY]),
    Case(
        "CRLF",
        "<tool_call>ferry_times\r\n<arg_key>harbour</arg_key>\r\n<arg_value>Ærø</arg_value>\r\n"
        "</tool_call>",
        calls=[A_FERRY],
    ),
]
_BARE = (
    'invoke name="ferry_times">\nparameter name="harbour">Ærøparameter>\ninvoke>',
    'invoke name="ferry_times">\n<parameter name="harbour">Ærø</parameter>\n</invoke>',
)
MINIMAX = [
    *(Case("no brackets", f"Hm.\n{bare}", "Hm.", calls=[A_FERRY]) for bare in _BARE),
    *(
        Case(
            "no brackets in a block",
            f"<minimax:tool_call>\n{bare}\n</minimax:tool_call>",
            calls=[A_FERRY],
        )
        for bare in _BARE
    ),
]
_LINES = (
    '<minimax:tool_call>\n<invoke name="ferry_times">\n<parameter name="harbour">Ærø</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
MINIMAX += [
    Case("CRLF", _LINES.replace("\n", "\r\n"), calls=[A_FERRY]),
    Case(
        "no brackets at all",
        f"Hm.\n{_BARE[0]}\nminimax:tool_call>",
        "Hm.",
        calls=[A_FERRY],
    ),
]
FUNCTIONARY = [
    Case("CRLF", 'ferry_times\r\n{"harbour": "Ærø"}', calls=[A_FERRY], tail=">>>"),
    Case("a prefix", '>>>functions.ferry_times\n{"harbour": "Ærø"}', calls=[A_FERRY]),
]
MINICPM = [
    Case(
        "CRLF",
        '<function name="ferry_times">\r\n<param name="harbour">\r\nÆrø\r\n</param>\r\n</function>',
        calls=[A_FERRY],
    )
]
MINIMAX += [
    Case(f"a block {name}", _LINES.replace("minimax:tool_call", name), calls=[A_FERRY])
    for name in ("minimax:toolcall", "tool_call")
]
_INVOKED = (
    '<invoke name="ferry_times">\n'
    '<parameter name="harbour" string="true">Ærø</parameter>\n</invoke>'
)
DSML = [
    Case(
        "no token of the family",
        f"<function_calls>\n{_INVOKED}\n</function_calls>",
        calls=[A_FERRY],
    ),
]
HARMONY = [
    Case(
        f"the recipient {name}",
        f'<|channel|>commentary to={name} <|constrain|>json<|message|>{{"harbour": "Ærø"}}',
        calls=[A_FERRY],
    )
    for name in (
        "functions:ferry_times",
        "default_api.ferry_times",
        "functions.functions.ferry_times",
    )
]
_TAGS = (
    "<tool_call>\n<function=ferry_times>\n<parameter=harbour>\nÆrø\n</parameter>\n"
    "<parameter=day>\nMon\n</parameter>\n</function>\n</tool_call>"
)
_PAIRS = (
    "<tool_call>ferry_times\n<arg_key>harbour</arg_key>\n<arg_value>Ærø</arg_value>\n"
    "<arg_key>day</arg_key>\n<arg_value>Mon</arg_value>\n</tool_call>"
)
_MONDAY: Call = ("ferry_times", {"harbour": "Ærø", "day": "Mon"})


def _mended(text: str, *changes: tuple[str, str]) -> list[Case]:
    """The call with each of these changes, which do not change what is meant."""
    return [
        Case(f"{right} as {wrong}", text.replace(right, wrong), calls=[_MONDAY])
        for right, wrong in changes
    ]


HALF_TAGS = _mended(
    _TAGS,
    ("<tool_call>", "<tool_call"),
    ("<parameter=harbour>", "parameter=harbour>"),
    ("<parameter=day>", "<parameter=day><parameter=day>"),
    ("<parameter=day>", "parameter=day>"),
    ("</parameter>", "/parameter>"),
    ("</function>", "/function>"),
)
HALF_PAIRS = _mended(
    _PAIRS,
    *(("<arg_key>", "arg_key>"), ("<arg_key>", "<arg_key><arg_key>")),
    *(("</arg_key>", "/arg_key>"), ("</arg_key>", "</arg_key></arg_key>")),
    *(("<arg_value>", "arg_value>"), ("</arg_value>", "/arg_value>")),
    ("</tool_call>", "/tool_call>"),
)
_PLAIN_CALLS = (_OBJECT, "ferry_times(harbour='Ærø')", 'ferry_times{"harbour": "Ærø"}')
DEEPSEEK = [
    *(
        Case(f"in a section: {call}", f"<｜tool▁calls▁begin｜>{call}{end}", calls=[A_FERRY])
        for call in _PLAIN_CALLS
        for end in ("<｜tool▁calls▁end｜>", "｜tool▁calls▁end｜>")
    ),
    *(
        Case(
            f"an end {end}",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ferry_times<｜tool▁sep｜>"
            f'{{"harbour": "Ærø"}}{end}<｜tool▁calls▁end｜>',
            calls=[A_FERRY],
        )
        for end in ("｜tool▁call▁end｜>", "<｜tool▁call▁end｜")
    ),
]
PHI4 = [
    Case("no opening", f"[{_OBJECT}]<|/tool_call|>", calls=[A_FERRY]),
    Case("no opening and no end", f"[{_OBJECT}]", calls=[A_FERRY]),
    *(
        Case(
            f"the opening {opener}", f"Hm.\n{opener}[{_OBJECT}]<|/tool_call|>", "Hm.", "", [A_FERRY]
        )
        for opener in ("|tool_call|>", "<|tool_call|")
    ),
    Case("an end", f"<|tool_call|>[{_OBJECT}]|/tool_call|>", calls=[A_FERRY]),
    Case("a list that is no call", '[{"name": "Bo"}]', '[{"name": "Bo"}]'),
]
REPORTED: dict[tuple[str, str | None, str], list[Case]] = {
    ("hermes", "qwen3", ""): [*NAMES_JSON, *QWEN, *TOOL_CODE],
    ("qwen3_coder", "qwen3", ""): [*NAMES_XML, *QWEN, *HALF_TAGS],
    ("deepseek_v31", None, ""): DEEPSEEK,
    ("deepseek_v32", None, ""): DSML,
    ("phi4", None, ""): PHI4,
    ("pythonic", None, ""): NAMES_PYTHON,
    ("glm45", "glm45", ""): [*NAMES_GLM, *GLM, *HALF_PAIRS],
    ("gemma4", None, ""): [*GEMMA, *TOOL_CODE],
    ("mistral", None, ""): MISTRAL,
    ("granite", None, ""): GRANITE,
    ("minimax_m2", None, ""): MINIMAX,
    ("minicpm5", None, ""): MINICPM,
    ("functionary", None, ""): FUNCTIONARY,
    ("openai", None, ""): HARMONY,
}
