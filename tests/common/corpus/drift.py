"""What models write instead of their own form, as users of other servers reported it.

The reports are about small, quantised and finetuned models, and about long conversations.
"""

from __future__ import annotations

import json

from tests.common.corpus import Call, Case

A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})
_MONDAY: Call = ("ferry_times", {"harbour": "Ærø", "day": "Mon"})
_UNKNOWN: Call = ("bus_times", {"stop": "x"})
_ARGUMENTS = '{"harbour": "Ærø"}'
_OBJECT = f'{{"name": "ferry_times", "arguments": {_ARGUMENTS}}}'
_TIDE = '{"name": "tide_now", "arguments": {}}'
_FENCED = f"```json\n{_ARGUMENTS}\n```"
_HARBOUR = "<parameter=harbour>\nÆrø\n</parameter>"
_FUNCTION = f"<function=ferry_times>\n{_HARBOUR}\n</function>"
_INVOKED = '<invoke name="ferry_times">\n<parameter name="harbour">Ærø</parameter>\n</invoke>'


def _cases(texts: dict[str, str], *calls: Call, content: str = "") -> list[Case]:
    return [Case(why, text, content, calls=list(calls) or [A_FERRY]) for why, text in texts.items()]


def _block(inside: str, name: str = "tool_call") -> str:
    return f"<{name}>\n{inside}\n</{name}>"


JSON = [
    *_cases(
        {
            "arguments in a code block": _block(
                f'{{"name": "ferry_times", "arguments": {_FENCED}}}'
            ),
            "a code block on lines": _block(
                f'{{"name": "ferry_times", "arguments":\n```\n{_ARGUMENTS}\n```\n}}'
            ),
            "no quote after a key": _block(
                f'{{"name="ferry_times", "arguments": {_ARGUMENTS}}}'
            ),
            "equals signs": _block(f'{{"name"="ferry_times", "arguments" = {_ARGUMENTS}}}'),
            "no quotes around keys": _block(f"{{name: 'ferry_times', arguments: {_ARGUMENTS}}}"),
            "space in a key": _block(_OBJECT.replace('"arguments', '" arguments')),
            "capitals": _block(_OBJECT.replace("name", "Name").replace("arg", "Arg")),
            "no braces": _block(_OBJECT[1:-1]),
            "a mapping": _block(f"name: ferry_times\narguments: {_ARGUMENTS}"),
            "an object in a string": _block(json.dumps(_OBJECT)),
            "a list of one object": _block(_OBJECT.replace(_ARGUMENTS, f"[{_ARGUMENTS}]")),
            "names and values": _block(
                _OBJECT.replace(_ARGUMENTS, '[{"name": "harbour", "value": "Ærø"}]')
            ),
            "arguments in arguments": _block(_OBJECT.replace(_ARGUMENTS, _OBJECT)),
            "parameters in arguments": _block(
                _OBJECT.replace(_ARGUMENTS, f'{{"parameters": {_ARGUMENTS}}}')
            ),
            "properties in arguments": _block(
                _OBJECT.replace(_ARGUMENTS, f'{{"properties": {_ARGUMENTS}}}')
            ),
            "func and tool_args": _block(
                f'{{"func": "ferry_times", "tool_args": {_ARGUMENTS}}}'
            ),
            "a recipient": f'{{"recipient_name": "functions.ferry_times", "parameters": '
            f"{_ARGUMENTS}}}",
            "uses of tools": '{"tool_uses": [{"recipient_name": "functions.ferry_times", '
            f'"parameters": {_ARGUMENTS}}}]}}',
            "another closing tag": f"<tool_call>\n{_OBJECT}\n</tool_response>",
            "the closing tag of many": f"<tool_call>\n{_OBJECT}\n</tool_calls>",
            "a closing tag too many": _block(f"{_OBJECT}</parameter>"),
            "a block in a block": _block(_block(_OBJECT), "tool_calls"),
            "capitals in tags": _block(_OBJECT, "TOOL_CALL"),
            "brackets": f"[TOOL_CALL]\n{_OBJECT}\n[/TOOL_CALL]",
            "small letters in brackets": f"[tool_calls]\n{_OBJECT}\n[/tool_calls]",
            "options": '[TOOL_CALL]\n{tool => "ferry_times", args => {\n  --harbour "Ærø"\n}}\n'
            "[/TOOL_CALL]",
            "elements": _block(
                f"<name>ferry_times</name>\n<arguments>{_ARGUMENTS}</arguments>", "tool_use"
            ),
            "the name in the tag": f'<tool_call name="ferry_times">\n{_ARGUMENTS}\n</tool_call>',
            "the name in another tag": f"<function_call=ferry_times>{_ARGUMENTS}</function_call>",
            "Doubao's markers": f"<|FunctionCallBegin|>[{_OBJECT}]<|FunctionCallEnd|>",
            "brackets in the tag": f"<function=ferry_times({_ARGUMENTS})</function>",
            "brackets and the end of the tag": f"<function=ferry_times({_ARGUMENTS})></function>",
            "brackets after the tag": f"<function=ferry_times>({_ARGUMENTS})</function>",
            "Python in the tag": "<function=ferry_times(harbour='Ærø')></function>",
        }
    ),
    *_cases(
        {
            "options on lines": '[TOOL_CALL]\n{tool => "ferry_times", args => {\n'
            '  --harbour "Ærø"\n  --day "Mon"\n}}\n[/TOOL_CALL]'
        },
        _MONDAY,
    ),
    Case("a key with an equals sign", _block(_OBJECT.replace("harbour", "a=b")),
         calls=[("ferry_times", {"a=b": "Ærø"})]),
    Case("a key that ends with one", _block(_OBJECT.replace("harbour", "a=")),
         calls=[("ferry_times", {"a=": "Ærø"})]),
    Case("a word as the only argument", _block('{"name": "save_note", "arguments": "Hm."}'),
         _block('{"name": "save_note", "arguments": "Hm."}')),
    Case("words in a block", "<tool_call>\nname: it is a word.\n</tool_call>",
         "<tool_call>\nname: it is a word.\n</tool_call>"),
]  # fmt: skip
LLAMA = _cases(
    {
        "arguments in a code block": f'{{"name": "ferry_times", "parameters": {_FENCED}}}',
        "equals signs": f'{{"name"="ferry_times", "parameters"={_ARGUMENTS}}}',
        "brackets in the tag": f"<function=ferry_times({_ARGUMENTS})</function>",
    }
)
TAGGED = [
    *_cases(
        {
            "arguments in a code block": _block(f"<function=ferry_times>\n{_FENCED}\n</function>"),
            "a closing tag of an older form": _block(f"{_FUNCTION}\n</function_invocation>"),
            "attributes of arguments": _block(_FUNCTION.replace("=harbour", ' name="harbour"')),
            "space around equals signs": _block(
                _FUNCTION.replace("=ferry", " = ferry").replace("=harbour", " = harbour")
            ),
            "a colon": _block(_FUNCTION.replace("=harbour", ": harbour")),
            "shorter tags": _block(_FUNCTION.replace("parameter", "param")),
            "an invocation": _block(_INVOKED),
            "an invocation with an equals sign": _block(
                _INVOKED.replace(' name="ferry_times"', "=ferry_times")
            ),
            "the tool as an element": _block(
                "<ferry_times>\n<harbour>Ærø</harbour>\n</ferry_times>"
            ),
            "the tool as an element around JSON": _block(
                f"<ferry_times>{_ARGUMENTS}</ferry_times>"
            ),
            "another element": _block(_FUNCTION.replace("function", "tool")),
            "the name as text": _block(f"<function>ferry_times</function>\n{_HARBOUR}"),
            "the name as text before arguments": _block(
                f"<function>ferry_times\n{_HARBOUR}\n</function>"
            ),
            "the name as an element": _block(
                f"<function>\n<name>ferry_times</name>\n{_HARBOUR}\n</function>"
            ),
            "the names of elements": _block(
                f"<function_name>ferry_times</function_name>\n<parameters>{_ARGUMENTS}</parameters>"
            ),
            "the name in the block": f"<tool_call=ferry_times>\n{_HARBOUR}\n</tool_call>",
            "a block in a block": _block(_block(_FUNCTION), "tool_calls"),
            "brackets in the tag": _block(f"<function=ferry_times({_ARGUMENTS})</function>"),
        }
    ),
    Case(
        "the tool as an element in a sentence",
        "Use <ferry_times> here.",
        "Use <ferry_times> here.",
    ),
]
SEED = _cases(
    {
        "a prefix of the inner tags": _block(
            _FUNCTION.replace("<", "<seed:").replace("<seed:/", "</seed:"), "seed:tool_call"
        ),
        "attributes": _block(
            _FUNCTION.replace("=ferry_times", ' name="ferry_times"'), "seed:tool_call"
        ),
    }
)
MINIMAX = _cases(
    {
        f"{why} in a block": _block(text, "minimax:tool_call")
        for why, text in {
            "equals signs": _INVOKED.replace(" name=", "=").replace('"', ""),
            "an equals sign": _INVOKED.replace(' name="ferry_times"', "=ferry_times"),
            "an equals sign before a key": _INVOKED.replace(' name="harbour"', "=harbour"),
            "shorter tags": _INVOKED.replace("parameter", "param"),
            "a prefix": _INVOKED.replace("<", "<minimax:").replace("<minimax:/", "</minimax:"),
            "another element": _INVOKED.replace("invoke", "tool"),
        }.items()
    }
    | {"another closing tag": f"<minimax:tool_call>\n{_INVOKED}\n</tool_call>"}
)
_MARK = "]<]minimax[>["


def _m3(*parts: str) -> str:
    return "".join(f"{_MARK}{part}" for part in ("<tool_call>\n", *parts, "</tool_call>"))


_M3_NAME, _M3_END = '<invoke name="ferry_times">', "</invoke>\n"
MINIMAX_M3 = [
    *_cases(
        {
            "no tag before the first value": _m3(_M3_NAME, "Ærø", "</harbour>", _M3_END),
            "no bracket": _m3(_M3_NAME[1:], "<harbour>Ærø", "</harbour>", _M3_END),
        }
    ),
    *_cases(
        {
            "a tag before the second value": _m3(
                _M3_NAME, "Ærø", "</harbour>", "<day>Mon", "</day>", _M3_END
            )
        },
        _MONDAY,
    ),
]
_PREFIX = "｜DSML｜"
_DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ferry_times">\n'
    '<｜DSML｜parameter name="harbour" string="true">Ærø</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)
DSML = [
    *(
        Case(
            f"the prefix {prefix} of {block}",
            before + _DSML.replace(_PREFIX, prefix).replace("tool_calls", block),
            before.strip(),
            calls=[A_FERRY],
        )
        for before, block in (("", "tool_calls"), ("Hm.\n", "function_calls"), ("", "calls"))
        for prefix in (
            *("｜DSML|", "|DSML｜", "DSML｜", "｜DSML", "DSML|", "|DSML", "|DSML|"),
            *("｜｜DSML｜｜", "｜｜DSML｜｜ ", "||DSML||", "‖DSML‖", "｜DSML｜ "),
        )
    ),
    *_cases(
        {
            "an equals sign": _DSML.replace(' name="ferry_times"', "=ferry_times"),
            "no block": _DSML.split("\n", 1)[1].rsplit("\n", 1)[0],
            "no end": _DSML.rsplit("\n", 2)[0],
            "no prefix in the block": "<｜DSML｜tool_calls>\n"
            + _INVOKED
            + "\n</｜DSML｜tool_calls>",
            "JSON and a closing tag too many": "<｜DSML｜tool_calls>\n"
            f'<｜DSML｜invoke name="ferry_times">\n{_ARGUMENTS}'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        }
    ),
    Case("the prefix as a word", "It is DSML｜tool.", "It is DSML｜tool."),
]
_ANSWER = "<arg_value>Ærø</arg_value>"
_NAME, _PAIR = "<tool_name>ferry_times</tool_name>", f"<arg_key>harbour</arg_key>{_ANSWER}"
GLM = _cases(
    {
        "arguments in a code block": _block(f"ferry_times\n{_FENCED}"),
        "a call's tag for a key's": f"<tool_call>ferry_times<tool_call>harbour</arg_key>{_ANSWER}"
        "</tool_call>",
        "a key behind the name": f"<tool_call>ferry_timesharbour</arg_key>{_ANSWER}</tool_call>",
        "a key after space": f"<tool_call>ferry_times harbour</arg_key>{_ANSWER}</tool_call>",
        "a colon behind the name": _block(f"ferry_times:\n<arg_key>harbour</arg_key>\n{_ANSWER}"),
        "stars around the name": _block(f"**ferry_times**\n<arg_key>harbour</arg_key>{_ANSWER}"),
        "a function": _block(
            f"<function=ferry_times>\n<arg_key>harbour</arg_key>\n{_ANSWER}\n</function>"
        ),
        "parameters": _block("ferry_times\n<parameter=harbour>Ærø</parameter>"),
        "attributes": _block('ferry_times\n<arg name="harbour">Ærø</arg>'),
        "elements of keys": _block("ferry_times\n<harbour>Ærø</harbour>"),
        "the name as an element": _block(f"{_NAME}\n{_PAIR}"),
        "an element and no tag": f"{_NAME}{_PAIR}",
        "an element and the last tag": f"{_NAME}\n{_PAIR}\n</tool_call>",
        "an open element": _block(f"<tool_name>ferry_times{_PAIR}"),
        "an element around the call": _block(f"<tool_name>ferry_times\n{_PAIR}</tool_name>"),
        "the end of an element": _block(f"ferry_times</tool_name>{_PAIR}"),
        "a sign before the value": _block(f"ferry_times<arg_key>harbour</arg_key>={_ANSWER}"),
        "an element, and JSON": f"{_NAME}{_ARGUMENTS}",
        **{
            f"an element, and JSON in {word}": f"{_NAME}\n<{word}>{_ARGUMENTS}</{word}>"
            for word in ("arguments", "parameters", "tool_args", "tool_arguments", "tool_input")
        },
        "another block with an element": f"<tool_use>{_NAME}{_PAIR}</tool_use>",
    }
)
GLM += [
    Case(
        "two elements",
        f"Hm.\n{_NAME}{_PAIR}{_NAME[:11]}tide_now</tool_name>",
        "Hm.",
        calls=[A_FERRY, A_TIDE],
    ),
    Case("an element in a sentence", f"It is {_NAME}.", f"It is {_NAME}."),
    Case("an element of no tool", "<tool_name>x</tool_name>", "<tool_name>x</tool_name>"),
]


def _kimi(name: str, arguments: str = _ARGUMENTS) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{name}<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|>"
    )


KIMI = [
    *_cases(
        {
            f"the id {name}": _kimi(name)
            for name in (
                *("functions_ferry_times_1", "functions_ferry_times:1", "ferry_times_0"),
                *("functions-ferry_times-0", "functions.ferry_times"),
            )
        }
    ),
    *_cases({"no braces": _kimi("functions.ferry_times:0", _ARGUMENTS[1:-1])}),
]


def _harmony(header: str, arguments: str = _ARGUMENTS) -> str:
    return f"{header}<|message|>{arguments}<|call|>"


_TO = "<|channel|>commentary to=functions.ferry_times"
HARMONY = _cases(
    {
        "a question mark": _harmony(_TO.replace("commentary", "commentary?")),
        "question marks": _harmony(_TO.replace("commentary", "??")),
        "a number": _harmony(_TO.replace("commentary", "commentary 2?")),
        "the recipient as the channel": _harmony("<|channel|>functions.ferry_times"),
        "arguments in arguments": _harmony(_TO, f'{{"arguments": {_ARGUMENTS}}}'),
        "a call in arguments": _harmony(_TO, _OBJECT),
        "arguments in a code block": _harmony(_TO, _FENCED),
        "arguments twice": _harmony(_TO, _ARGUMENTS * 2),
        "no functions and no tool's channel": _harmony(
            "<|channel|>commentary functions.ferry_times"
        ),
        "no channel": _harmony("functions.ferry_times <|constrain|>json"),
        "space before the recipient": _harmony(_TO.replace("to=", "to= ")),
        "quotes around the recipient": _harmony('<|channel|>commentary to="functions.ferry_times"'),
        "no markup": f"commentary to=functions.ferry_times {_ARGUMENTS}",
        "no markup but the end": f"commentary to=functions.ferry_times json{_ARGUMENTS}<|call|>",
        "carriage returns": _harmony(f"{_TO} json\r\n", f"\r\n{_ARGUMENTS}\r\n") + "\r\n",
        "a call as the message": f"<|channel|>commentary json<|message|>{_OBJECT}<|call|>",
        "a call as the answer": f"<|channel|>final<|message|>{_OBJECT}",
        "a call and nothing else": _OBJECT,
        "a list as the answer": f"<|channel|>final<|message|>[{_OBJECT}]",
        **{
            f"{wrong} for {mark}": _harmony(f"{_TO} <|constrain|>json").replace(mark, wrong)
            for mark in ("<|channel|>", "<|constrain|>", "<|message|>")
            for wrong in (mark[1:], mark[2:], mark[:-1], mark[:-2], mark[:-2] + ">")
        },
    }
)
HARMONY += [
    *(
        Case(f"text after {end}", _harmony(_TO)[: -len("<|call|>")] + end, "Hm.", calls=[A_FERRY])
        for end in ("Hm.", "\nHm.<|call|>", "\n\nHm.", "<|call|>\n\nHm.", "<|end|>Hm.<|end|>")
    ),
    Case(
        "two objects",
        _harmony(_TO, f'{_ARGUMENTS}\n{{"harbour": "Fyn"}}'),
        calls=[A_FERRY, ("ferry_times", {"harbour": "Fyn"})],
    ),
    *(
        Case(f"an answer like {text}", text, text)
        for text in (
            f"commentary to=functions.bus_times {_ARGUMENTS}",
            "functions.ferry_times {a}",
            "channel|> and text",
            "message|> and text",
            '{"name": "bus_times", "arguments": {}}',
        )
    ),
]
GEMMA = _cases(
    {
        f"call{sign}": f'<|tool_call>call{sign}ferry_times{{harbour:<|"|>Ærø<|"|>}}<tool_call|>'
        for sign in "= "
    }
    | {
        "arguments in arguments": '<|tool_call>call:ferry_times{args:{harbour:<|"|>Ærø<|"|>}}'
        "<tool_call|>"
    }
)
MISTRAL = [
    *_cases(
        {
            f"before the arguments {sign}": f"[TOOL_CALLS]ferry_times{sign}{_ARGUMENTS}"
            for sign in (
                *(": ", "=", "[ARGS][ARGS]", "[ARGS]ferry_times[ARGS]", "[args]", "[ARGUMENTS]"),
                *("[ARGS", "\n"),
            )
        }
    ),
    *_cases(
        {
            "a list of one object": f"[TOOL_CALLS]ferry_times[ARGS][{_ARGUMENTS}]",
            "a whole call": f"[TOOL_CALLS]ferry_times[ARGS]{_OBJECT}",
            "quotes around the name": f'[TOOL_CALLS]"ferry_times"[ARGS]{_ARGUMENTS}',
            "small letters": f"[tool_calls][{_OBJECT}]",
            "arguments in a code block": f"[TOOL_CALLS]{_OBJECT.replace(_ARGUMENTS, _FENCED)}",
        }
    ),
]


def _python(inside: str) -> str:
    return f"<|tool_call_start|>[{inside}]<|tool_call_end|>"


LFM2 = _cases(
    {
        "an object": _python(f"ferry_times{_ARGUMENTS}"),
        "print": _python("print(ferry_times(harbour='Ærø'))"),
        "a variable": _python("x = ferry_times(harbour='Ærø')"),
        "await": _python("await ferry_times(harbour='Ærø')"),
        "typographic quotes": _python("ferry_times(harbour=“Ærø”)"),
        "a list in a list": _python("[ferry_times(harbour='Ærø')]"),
        "quotes around a key": _python("ferry_times('harbour'='Ærø')"),
        "a key of JSON": _python('ferry_times("harbour": "Ærø")'),
    }
)
PHI = _cases(
    {
        "markers of many": f"<|tool_calls|>[{_OBJECT}]<|/tool_calls|>",
        "no brackets": f"functools{_OBJECT}",
        "space": f"functools [{_OBJECT}]",
        "another closing marker": f"<|tool_call|>[{_OBJECT}]</|tool_call|>",
    }
)
FUNCTIONARY = [
    Case("an unknown tool", 'bus_times\n{"stop": "x"}', calls=[_UNKNOWN], tail=">>>"),
    Case(
        "an unknown tool after text",
        'all\nHm.\n>>>bus_times\n{"stop": "x"}',
        "Hm.",
        calls=[_UNKNOWN],
        tail=">>>",
    ),
    Case("text", "It is\n{}", "It is\n{}", tail=">>>"),
]
APERTUS = [
    Case(
        "an unknown tool",
        '<|tools_prefix|>[{"bus_times": {"stop": "x"}}]<|tools_suffix|>',
        calls=[_UNKNOWN],
    ),
    Case(
        "a known and an unknown tool",
        f'<|tools_prefix|>[{{"ferry_times": {_ARGUMENTS}}}, {{"bus_times": {{"stop": "x"}}}}]'
        "<|tools_suffix|>",
        calls=[A_FERRY, _UNKNOWN],
    ),
]
DRIFT: dict[tuple[str, str | None, str], list[Case]] = {
    ("hermes", "qwen3", ""): JSON,
    ("llama3_json", None, ""): LLAMA,
    ("qwen3_coder", "qwen3", ""): TAGGED,
    ("seed_oss", None, ""): SEED,
    ("minimax_m2", None, ""): MINIMAX,
    ("minimax_m3", None, ""): MINIMAX_M3,
    ("deepseek_v32", None, ""): DSML,
    ("deepseek_v4", None, ""): DSML,
    ("deepseek_v41", None, ""): DSML,
    ("glm45", "glm45", ""): GLM,
    ("kimi_k2", None, ""): KIMI,
    ("openai", None, "<|start|>assistant"): HARMONY,
    ("gemma4", None, ""): GEMMA,
    ("mistral", None, ""): MISTRAL,
    ("lfm2", None, ""): LFM2,
    ("phi4_mini_json", None, ""): PHI,
    ("functionary", None, ""): FUNCTIONARY,
    ("apertus", None, ""): APERTUS,
}
