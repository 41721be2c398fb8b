"""Mistakes that models make in markers and tags, and tokens that end a turn written as text."""

from __future__ import annotations

import json

from tests.common.corpus import Call, Case

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})
_MONDAY: Call = ("ferry_times", {"harbour": "Ærø", "day": "Mon"})
_ARGUMENTS = '{"harbour": "Ærø"}'
_OBJECT = f'{{"name": "ferry_times", "arguments": {_ARGUMENTS}}}'
_TAGS = (
    "<tool_call>\n<function=ferry_times>\n<parameter=harbour>\nÆrø\n</parameter>\n</function>\n"
    "</tool_call>"
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ferry_times\n```json\n"
    f"{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="ferry_times">\n'
    '<｜DSML｜parameter name="harbour" string="true">Ærø</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
_PREFIX = "antml:"
_KEY = "<tool_call>ferry_times\n<arg_key>harbour</arg_key>\n<arg_value>Ærø\n"


def _ends(call: str, *tokens: str) -> list[Case]:
    """A call, and text, with each of these tokens behind."""
    return [
        *(Case(f"{token} after a call", f"{call}{token}", calls=[A_FERRY]) for token in tokens),
        *(Case(f"{token} after text", f"Hm.{token}", "Hm.") for token in tokens),
        *(
            Case(f"{token} on its own line", f"{call}\n{token}\n", calls=[A_FERRY])
            for token in tokens
        ),
        *(
            Case(f"text after {token}", f"{call}{token}\nHm.", "Hm.", calls=[A_FERRY])
            for token in tokens
        ),
    ]


HERMES = [
    *_ends(f"<tool_call>\n{_OBJECT}\n</tool_call>", "<|im_end|>", "<|endoftext|>", "</s>"),
    Case("two ends", "Hm.<|im_end|>\n<|endoftext|>", "Hm."),
    Case("an end instead of the closing", f"<tool_call>\n{_OBJECT}<|im_end|>", calls=[A_FERRY]),
    Case(
        "an end before the closing",
        f"<tool_call>\n{_OBJECT}<|im_end|>\n</tool_call>",
        calls=[A_FERRY],
    ),
    Case("an end in the middle", "Hm.</s> So.", "Hm.</s> So."),
    Case("the beginning of another end", "Hm.</s> </s", "Hm.</s> </s"),
    Case("an end in code", "It is `<|im_end|>`", "It is `<|im_end|>`"),
    Case("crossed out", "It was <s>12</s>", "It was <s>12</s>"),
    Case("an end at the length limit", "Hm.<|im_end|>", "Hm.", cut=True),
    Case("the turn again", f"<|im_start|>assistant\n<tool_call>{_OBJECT}", calls=[A_FERRY]),
]
LLAMA = [
    *_ends(_OBJECT.replace("arguments", "parameters"), "<|eot_id|>", "<|eom_id|>")[:2],
    Case(
        "the turn again",
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{_OBJECT}",
        calls=[A_FERRY],
    ),
]
TAGGED = [
    Case(
        "a quote too many in a tag",
        _TAGS.replace("=ferry_times", '=ferry_times"').replace("=harbour", "='harbour"),
        calls=[A_FERRY],
    ),
    *_ends(_TAGS, "<|im_end|>"),
    Case(
        "a key in the closing tag",
        _TAGS.replace("</parameter>", "</parameter=harbour>"),
        calls=[A_FERRY],
    ),
    Case(
        "a name in the closing tag",
        _TAGS.replace("</function>", "</function=ferry_times>"),
        calls=[A_FERRY],
    ),
    Case("closed by the key", _TAGS.replace("</parameter>", "</harbour>"), calls=[A_FERRY]),
    Case(
        "a tag with the name of the key in the value",
        _TAGS.replace("Ærø", "<harbour>\nÆrø\n</harbour>"),
        calls=[("ferry_times", {"harbour": "<harbour>\nÆrø\n</harbour>"})],
    ),
    Case(
        "elements of keys",
        "<tool_call>\n<function=ferry_times>\n<harbour>Ærø</harbour>\n<day>Mon</day>\n"
        "</function>\n</tool_call>",
        calls=[_MONDAY],
    ),
    Case(
        "tags around the parameters",
        _TAGS.replace("<parameter=", "<parameters>\n<parameter=").replace(
            "</function>", "</parameters>\n</function>"
        ),
        calls=[A_FERRY],
    ),
    Case(
        "tags around JSON",
        "<tool_call>\n<function=ferry_times>\n<parameters>" + _ARGUMENTS + "</parameters>\n"
        "</function>\n</tool_call>",
        calls=[A_FERRY],
    ),
    *(
        Case(f"a block {name}", _TAGS.replace("tool_call", name), calls=[A_FERRY])
        for name in ("tool_calls", "tools", "function_call")
    ),
    Case(
        "a prefix of another family",
        f'<{_PREFIX}function_calls>\n<{_PREFIX}invoke name="ferry_times">\n'
        f'<{_PREFIX}parameter name="harbour">Ærø</{_PREFIX}parameter>\n'
        f"</{_PREFIX}invoke>\n</{_PREFIX}function_calls>",
        calls=[A_FERRY],
    ),
    Case(
        "an end before the closing of the block",
        _TAGS.replace("\n</tool_call>", "<|im_end|>\n</tool_call>"),
        calls=[A_FERRY],
    ),
]
DEEPSEEK = [
    *_ends(_DEEPSEEK, "<｜end▁of▁sentence｜>"),
    *(
        Case(
            f"markers with {bar} and {gap}",
            f"{before}{_DEEPSEEK.replace('｜', bar).replace('▁', gap)}",
            before.strip(),
            calls=[A_FERRY],
        )
        for bar in "｜|"
        for gap in "▁_ "
        for before in ("", "Hm.\n")
    ),
]
UNDIVIDED = Case(
    "no marker before the name", _DEEPSEEK.replace("<｜tool▁sep｜>", ""), calls=[A_FERRY]
)
DSML = [Case("ASCII bars", _DSML.replace("｜", "|"), calls=[A_FERRY])]
GLM = [
    *_ends(f"{_KEY.rstrip()}</arg_value>\n</tool_call>", "<|user|>", "<|observation|>"),
    Case("no end of a value", f"{_KEY}</tool_call>", calls=[A_FERRY]),
    Case(
        "no end of a value before the next key",
        f"{_KEY}<arg_key>day</arg_key>\n<arg_value>Mon</arg_value>\n</tool_call>",
        calls=[_MONDAY],
    ),
    Case("no end of a value, cut", _KEY, cut=True),
    Case(
        "quotes around a key",
        f"{_KEY.replace('>harbour<', '>`harbour`<').rstrip()}</arg_value>\n</tool_call>",
        calls=[A_FERRY],
    ),
    Case(
        "no tag before the next key",
        f"{_KEY.rstrip()}</arg_value>\nday</arg_key>\n<arg_value>Mon</arg_value>\n</tool_call>",
        calls=[_MONDAY],
    ),
    Case(
        "another text before a key's end",
        f"{_KEY.rstrip()}</arg_value>\nno</arg_key>\n<arg_value>Mon</arg_value>\n</tool_call>",
        calls=[
            ("ferry_times", {"harbour": "Ærø</arg_value>\nno</arg_key>\n<arg_value>Mon"}),
        ],
    ),
]
MISTRAL = [
    Case(
        "text before and after a call",
        "Hm.\n\n[TOOL_CALLS]tide_now[ARGS]{}\n\nSo.",
        "Hm.\n\nSo.",
        calls=[A_TIDE],
    ),
    Case(
        "no opening, behind text",
        f"Hm.\n\nferry_times[ARGS]{_ARGUMENTS}",
        "Hm.",
        calls=[A_FERRY],
    ),
    *_ends(f"[TOOL_CALLS][{_OBJECT}]", "</s>"),
    *(
        Case(
            f"the opening {opening}", f"{before}{opening}[{_OBJECT}]", before.strip(), "", [A_FERRY]
        )
        for opening in (
            *("[TOOL_CALLS]", "[TOOL_CALLS]: ", "TOOL_CALLS]", "[TOOL_CALLS ", "TOOL_CALLS "),
            *("TOOL_CALLS", "[TOOL_CALL] "),
        )
        for before in ("", "Hm.\n\n")
    ),
    *(
        Case(f"a name after {opening}", f"{opening}ferry_times{sign}{_ARGUMENTS}", calls=[A_FERRY])
        for opening in ("TOOL_CALLS]", "TOOL_CALLS ")
        for sign in ("[ARGS]", "")
    ),
    Case("the opening as a word", "TOOL_CALLS is a word.", "TOOL_CALLS is a word."),
    Case("a closing marker", f"[TOOL_CALLS][{_OBJECT}][/TOOL_CALLS]", calls=[A_FERRY]),
    Case(
        "an end between calls",
        f"[TOOL_CALLS]ferry_times[ARGS]{_ARGUMENTS}</s>[TOOL_CALLS]tide_now[ARGS]{{}}",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("a list of JSON in strings", f"[TOOL_CALLS][{json.dumps(_OBJECT)}]", calls=[A_FERRY]),
]
_FENCED = '<|tool_call>call:ferry_times(harbour=<|"|>Ærø<|"|>)<tool_call|>'
GEMMA = [
    Case("fences in Python", _FENCED, calls=[A_FERRY]),
    Case(
        "no braces at the end",
        '<|tool_call>call:ferry_times{harbour:<|"|>Ærø<|"|>',
        calls=[A_FERRY],
    ),
]
PYTHON = [
    Case("no brackets at the end", "<|python_start|>[ferry_times(harbour='Ærø'", calls=[A_FERRY]),
    Case(
        "no value at the end",
        "<|python_start|>[ferry_times(harbour=",
        "<|python_start|>[ferry_times(harbour=",
        calls=[("ferry_times", '{"harbour": ')],
    ),
    Case("no brackets, cut", "<|python_start|>[ferry_times(harbour='Ærø'", cut=True),
]
MINIMAX = [Case("the end [e~[", "Hm.[e~[", "Hm.")]
MINICPM = [
    Case(
        "a block",
        '<tool_call>\n<function name="ferry_times"><param name="harbour">Ærø</param></function>\n'
        "</tool_call>",
        calls=[A_FERRY],
    )
]
HORIZON = [
    Case(
        "lines between tags",
        "<ifm|tool_calls><ifm|tool_call>ferry_times\n<ifm|arg_key>harbour</ifm|arg_key>\n"
        "<ifm|arg_type>string</ifm|arg_type>\n<ifm|arg_value>Ærø</ifm|arg_value>\n"
        "</ifm|tool_call></ifm|tool_calls>",
        calls=[A_FERRY],
    )
]
_REQUEST = (
    "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
    "<|plamo:begin_tool_name:plamo|>ferry_times<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    f"{_ARGUMENTS}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
    "<|plamo:end_tool_requests:plamo|>"
)
PLAMO = [
    Case(f"{end} as {wrong}", _REQUEST.replace(end, wrong), calls=[A_FERRY])
    for end in ("<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>")
    for wrong in ("", f"{end}\n")
]
OLMO = [
    Case("no opening", "ferry_times(harbour='Ærø')\n</function_calls>", calls=[A_FERRY]),
    Case("no marker, and text", "tide_now() is a tool.", "tide_now() is a tool."),
]
FUNCTION_GEMMA = [
    Case(
        f"{before!r} and no opening",
        f"{before}call:ferry_times{{harbour:<escape>Ærø<escape>}}<end_function_call>",
        before.strip(),
        calls=[A_FERRY],
    )
    for before in ("", "Hm.\n")
]
_QUOTED = (
    'echo "hello world"',
    'git commit -m "fix: it" -q',
    'grep -E "^\\d+" f | sed "s/a/b/"',
    'find . -name "*.py" | xargs grep "x"',
    '<a href="x">y</a>\n<b id="z"/>',
    'const a = "b";\nconsole.log("x", a);\nf(["c", 1]);\n',
    'python -c "print({1: 2}[1])"',
    '{"a": {"b": "c"}}',
    '[\n  {"a": "b"},\n  {"c": "d"}\n]',
)
"""Texts whose quotes models forget to escape in JSON."""
QUOTES = [
    *(
        Case(
            f"quotes not escaped in {text!r}, {place}",
            f"<tool_call>\n{call}\n</tool_call>",
            calls=[("save_note", {"path": "n", "text": text})],
        )
        for text in _QUOTED
        for string in ['"' + text.replace("\\", "\\\\") + '"']
        for place, members in {
            "last": f'{{"path": "n", "text": {string}}}',
            "last, on lines": f'{{\n  "path": "n",\n  "text": {string}\n}}',
        }.items()
        for call in [f'{{"name": "save_note", "arguments": {members}}}']
    ),
    *(
        Case(
            f"quotes not escaped in {text!r}, before another member",
            f'<tool_call>{{"name": "save_note", "arguments": {{"text": "{text}", "path": "n"}}}}'
            "</tool_call>",
            calls=[("save_note", {"text": text, "path": "n"})],
        )
        for text in _QUOTED
        if "\\" not in text
    ),
    *(
        Case(
            f"a string in {mark}",
            f'<tool_call>{{"name": "save_note", "arguments": {{"text": {mark}{text}{mark}, '
            '"path": "n"}}</tool_call>',
            calls=[("save_note", {"text": text, "path": "n"})],
        )
        for mark in ('"""', "`")
        for text in ("one", 'say "a",\n{"b": 1},\nend\n')
    ),
    Case(
        "arguments in a string without escapes",
        f'<tool_call>{{"name": "ferry_times", "arguments": "{_ARGUMENTS}"}}</tool_call>',
        calls=[A_FERRY],
    ),
    Case(
        "keys with signs",
        '<tool_call>{"name": "book_cabin", "arguments": {"route": {"a,b": "1", "c:\\"d": "[", '
        '"e f": "{", "": "x"}}}</tool_call>',
        calls=[("book_cabin", {"route": {"a,b": "1", 'c:"d': "[", "e f": "{", "": "x"}})],
    ),
    Case(
        "strings of brackets and signs",
        '<tool_call>{"name": "book_cabin", "arguments": {"guests": ["{", ":", "}", "", "[", ","]}}'
        "</tool_call>",
        calls=[("book_cabin", {"guests": ["{", ":", "}", "", "[", ","]})],
    ),
    Case(
        "numbers as Python writes them",
        '<tool_call>{"name": "book_cabin", "arguments": {"price": .5, "berths": +2, "code": 012}}'
        "</tool_call>",
        calls=[("book_cabin", {"price": 0.5, "berths": 2, "code": "012"})],
    ),
]
BARE = [
    Case(
        f"two calls{why}",
        f'{_OBJECT}{between}{{"name": "tide_now", "arguments": {{}}}}',
        calls=[A_FERRY, A_TIDE],
    )
    for why, between in {"": "; ", " on lines": "\n", " with a line between": "\n\n"}.items()
]
BARE += [
    Case("a name before JSON", f"ferry_times{space}{_ARGUMENTS}", calls=[A_FERRY])
    for space in ("", " ", "\n")
] + [
    Case(why, text, text)
    for why, text in {
        "another name before JSON": f"harbours {_ARGUMENTS}",
        "a tool's name before a block of code": "ferry_times { harbour: red }",
        "a name before JSON, and text": f"ferry_times {_ARGUMENTS} is a call.",
    }.items()
]
ELEMENT = [
    Case(f"{begun!r} around the answer", f"<think>So.</think>{begun}Hm.{end}", "Hm.", "So.")
    for begun, end in (("<response>", "</response>"), ("\n<response>\n", "\n</response>\n"))
] + [
    Case(
        "the element in the answer",
        "<think>So.</think>\nIt is <response>1</response> here.",
        "It is <response>1</response> here.",
        "So.",
    ),
]
ANSWERED = Case(
    "the element in the answer",
    "<answer>\nWrite <answer>1</answer> here.\n</answer>",
    "Write <answer>1</answer> here.",
)
MISTAKES: dict[tuple[str, str | None, str], list[Case]] = {
    ("hermes", "qwen3", ""): [*HERMES, *QUOTES, *BARE],
    ("granite", None, ""): ELEMENT,
    ("ernie45", None, ""): ELEMENT,
    ("hunyuan_a13b", None, ""): [ANSWERED],
    ("llama3_json", None, ""): LLAMA,
    ("qwen3_coder", "qwen3", ""): TAGGED,
    ("deepseek_v3", None, ""): [*DEEPSEEK, UNDIVIDED],
    ("deepseek_v31", None, ""): DEEPSEEK,
    ("deepseek_v32", None, ""): DSML,
    ("glm45", "glm45", ""): GLM,
    ("mistral", "mistral", ""): MISTRAL,
    ("gemma4", None, ""): GEMMA,
    ("plamo3", None, ""): PLAMO,
    ("olmo3", None, ""): OLMO,
    ("function_gemma", None, ""): FUNCTION_GEMMA,
    ("pythonic", None, ""): PYTHON,
    ("minimax_m2", None, ""): MINIMAX,
    ("minicpm5", None, ""): MINICPM,
    ("k2_horizon", None, ""): HORIZON,
}
