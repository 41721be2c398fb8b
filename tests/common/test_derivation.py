"""Call formats that nobody wrote down are derived from what a template renders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from transformers.utils.chat_parsing import parse_response

from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.errors import InvalidRequest
from backend.engine.prompting.chat_format import chat_format
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from common.formats.derivation import ONE, TWO, Calls, Made, derived
from common.formats.response_template import described
from common.formats.shapes import FencedShape, JsonShape, PythonShape, TagShape
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import tool
from tests.common.grammar_walks import byte_tokenizer
from tests.engine.constraints.walks import byte_walk, quick_compiler_for

TURNS = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.tool_calls %}CALLS{% else %}"
    "{{ m.content }}{% endif %}<|over|>\n{% endfor %}<|turn|>assistant\n"
)
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments|tojson }}}'
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}EACH{% endfor %}"
COMMA = "{{ ', ' if not loop.last }}"
KEYS = "{% for k, v in f.arguments.items() %}KEY{% endfor %}"
TEXT = "{{ v if v is string else v|tojson }}"
ESCAPED = "{{ v|e if v is string else v|tojson }}"
NL = "\n"
WRITTEN: dict[str, tuple[str, type]] = {
    "JSON, each in a block": (EACH.replace("EACH", f"<fn>\n{OBJECT}\n</fn>\n"), JsonShape),
    "compact JSON": (
        EACH.replace("EACH", '<fn>{"name":"{{ f.name }}","input":{{ f.arguments|tojson }}}</fn>'),
        JsonShape,
    ),
    "a list of JSON": (
        f"<|calls|>[{EACH.replace('EACH', OBJECT + COMMA)}]<|/calls|>",
        JsonShape,
    ),
    "a name and JSON": (
        "<|acts|>"
        + EACH.replace("EACH", "<|act|>{{ f.name }}<|with|>{{ f.arguments|tojson }}<|/act|>")
        + "<|/acts|>",
        JsonShape,
    ),
    "a recipient": (
        EACH.replace("EACH", "<|to:{{ f.name }}|>{{ f.arguments|tojson }}<|done|>"),
        JsonShape,
    ),
    "a name in an attribute": (
        EACH.replace("EACH", '<act name="{{ f.name }}">\n{{ f.arguments|tojson }}\n</act>\n'),
        JsonShape,
    ),
    "a name in a tag": (
        EACH.replace("EACH", "<act={{ f.name }}>{{ f.arguments|tojson }}</act>"),
        JsonShape,
    ),
    "a name in an element": (
        EACH.replace(
            "EACH",
            "<act><name>{{ f.name }}</name><with>{{ f.arguments|tojson }}</with></act>",
        ),
        JsonShape,
    ),
    "a list of a name and JSON": (
        EACH.replace("EACH", '<fn>["{{ f.name }}", {{ f.arguments|tojson }}]</fn>'),
        JsonShape,
    ),
    "ids": (
        EACH.replace("EACH", f'<fn>{OBJECT[:-1]}, "id": "{{{{ c.id }}}}"}}</fn>'),
        JsonShape,
    ),
    "ids behind names": (
        EACH.replace(
            "EACH",
            "<|act|>{{ f.name }}<|id|>{{ c.id }}<|with|>{{ f.arguments|tojson }}<|/act|>",
        ),
        JsonShape,
    ),
    "brackets around JSON": (
        EACH.replace("EACH", "<py>{{ f.name }}({{ f.arguments|tojson }})</py>\n"),
        JsonShape,
    ),
    "own keys": (
        EACH.replace("EACH", '<fn>{"cmd": "{{ f.name }}", "with": {{ f.arguments|tojson }}}</fn>'),
        JsonShape,
    ),
    "a list with own keys": (
        "[CALLS]["
        + EACH.replace("EACH", '{"fn": "{{ f.name }}", "data": {{ f.arguments|tojson }}}' + COMMA)
        + "][/CALLS]",
        JsonShape,
    ),
    "ReAct": (
        EACH.replace("EACH", "Action: {{ f.name }}\nAction Input: {{ f.arguments|tojson }}\n"),
        JsonShape,
    ),
    "after reasoning": (
        f"<ponder></ponder>{EACH.replace('EACH', f'<fn>{OBJECT}</fn>')}",
        JsonShape,
    ),
    "tags": (
        "<acts>\n"
        + EACH.replace(
            "EACH",
            '<act name="{{ f.name }}">\n'
            + KEYS.replace("KEY", f'<arg name="{{{{ k }}}}">{TEXT}</arg>\n')
            + "</act>\n",
        )
        + "</acts>",
        TagShape,
    ),
    "tags, each in a block": (
        EACH.replace(
            "EACH",
            "<act>\n<do={{ f.name }}>\n"
            + KEYS.replace("KEY", f"<with={{{{ k }}}}>\n{TEXT}\n</with>\n")
            + "</do>\n</act>\n",
        ),
        TagShape,
    ),
    "tags around JSON": (
        EACH.replace(
            "EACH",
            '<act name="{{ f.name }}">'
            + KEYS.replace("KEY", '<arg name="{{ k }}">{{ v|tojson }}</arg>')
            + "</act>\n",
        ),
        TagShape,
    ),
    "tags with types": (
        "<acts>"
        + EACH.replace(
            "EACH",
            '<act tool="{{ f.name }}">'
            + KEYS.replace(
                "KEY",
                """<arg key="{{ k }}" text="{{ 'yes' if v is string else 'no' }}">"""
                f"{TEXT}</arg>",
            )
            + "</act>",
        )
        + "</acts>",
        TagShape,
    ),
    "a name before tags": (
        EACH.replace(
            "EACH",
            "<|act|>{{ f.name }}<|with|>"
            + KEYS.replace("KEY", f'<arg name="{{{{ k }}}}">{TEXT}</arg>')
            + "<|done|>",
        ),
        TagShape,
    ),
    "a name on a line before tags": (
        EACH.replace(
            "EACH",
            "<act>{{ f.name }}\n"
            + KEYS.replace("KEY", f"<arg={{{{ k }}}}>{TEXT}</arg>\n")
            + "</act>\n",
        ),
        TagShape,
    ),
    "indented tags": (
        EACH.replace(
            "EACH",
            '<act name="{{ f.name }}">\n'
            + KEYS.replace("KEY", f'  <with name="{{{{ k }}}}">{TEXT}</with>\n')
            + "</act>\n",
        ),
        TagShape,
    ),
    "keys and values": (
        EACH.replace(
            "EACH",
            "<act>{{ f.name }}\n"
            + KEYS.replace("KEY", f"<key>{{{{ k }}}}</key>\n<val>{TEXT}</val>\n")
            + "</act>\n",
        ),
        TagShape,
    ),
    "the name after the arguments": (
        EACH.replace(
            "EACH",
            '<fn>{"arguments": {{ f.arguments|tojson }}, "name": "{{ f.name }}"}</fn>',
        ),
        JsonShape,
    ),
    "a list of names after arguments": (
        "<|calls|>["
        + EACH.replace("EACH", '{"with": {{ f.arguments|tojson }}, "do": "{{ f.name }}"}' + COMMA)
        + "]<|/calls|>",
        JsonShape,
    ),
    "elements": (
        EACH.replace(
            "EACH",
            "<fn={{ f.name }}>"
            + KEYS.replace("KEY", f"<{{{{ k }}}}>{TEXT}</{{{{ k }}}}>")
            + "</fn>",
        ),
        TagShape,
    ),
    "elements of tools": (
        EACH.replace(
            "EACH",
            "<act>\n<{{ f.name }}>\n"
            + KEYS.replace("KEY", f"<{{{{ k }}}}>{TEXT}</{{{{ k }}}}>\n")
            + "</{{ f.name }}>\n</act>\n",
        ),
        TagShape,
    ),
    "elements of tools in one block": (
        "<acts>"
        + EACH.replace(
            "EACH",
            "<{{ f.name }}>"
            + KEYS.replace("KEY", f'<with name="{{{{ k }}}}">{TEXT}</with>')
            + "</{{ f.name }}>",
        )
        + "</acts>",
        TagShape,
    ),
    "elements on lines": (
        "<acts>\n"
        + EACH.replace(
            "EACH",
            '<act name="{{ f.name }}">\n'
            + KEYS.replace("KEY", f"<{{{{ k }}}}>{TEXT}</{{{{ k }}}}>\n")
            + "</act>\n",
        )
        + "</acts>",
        TagShape,
    ),
    "Python": (
        "<|py|>["
        + EACH.replace(
            "EACH",
            "{{ f.name }}("
            + KEYS.replace("KEY", "{{ k }}={{ v|tojson }}{{ ', ' if not loop.last }}")
            + "){{ ', ' if not loop.last }}",
        )
        + "]<|/py|>",
        PythonShape,
    ),
    "Python, each in a block": (
        EACH.replace(
            "EACH",
            "<py>{{ f.name }}("
            + KEYS.replace("KEY", "{{ k }}={{ v|tojson }}{{ ', ' if not loop.last }}")
            + ")</py>\n",
        ),
        PythonShape,
    ),
    "elements of tools without a block": (
        EACH.replace(
            "EACH",
            "<{{ f.name }}>\n"
            + KEYS.replace("KEY", f"<{{{{ k }}}}>{TEXT}</{{{{ k }}}}>\n")
            + "</{{ f.name }}>\n",
        ),
        TagShape,
    ),
    "JSON in an element of the tool": (
        EACH.replace("EACH", "<{{ f.name }}>{{ f.arguments|tojson }}</{{ f.name }}>\n"),
        JsonShape,
    ),
    "JSON in an element of the tool in a block": (
        EACH.replace(
            "EACH", "<act>\n<{{ f.name }}>\n{{ f.arguments|tojson }}\n</{{ f.name }}>\n</act>\n"
        ),
        JsonShape,
    ),
    "a list of names and values": (
        EACH.replace(
            "EACH",
            '<fn>{"name": "{{ f.name }}", "arguments": ['
            + KEYS.replace(
                "KEY", '{"name": "{{ k }}", "value": {{ v|tojson }}}{{ ", " if not loop.last }}'
            )
            + "]}</fn>\n",
        ),
        JsonShape,
    ),
    "lines": (
        EACH.replace(
            "EACH",
            f"<act>\n{{{{ f.name }}}}\n{KEYS.replace('KEY', f'{{{{ k }}}}={TEXT}{NL}')}</act>\n",
        ),
        TagShape,
    ),
    "lines with JSON": (
        EACH.replace(
            "EACH",
            "<act>{{ f.name }}\n" + KEYS.replace("KEY", "{{ k }} = {{ v|tojson }}\n") + "</act>\n",
        ),
        TagShape,
    ),
    "YAML": (
        EACH.replace(
            "EACH",
            "<act>\nname: {{ f.name }}\narguments:\n"
            + KEYS.replace("KEY", f"  {{{{ k }}}}: {TEXT}\n")
            + "</act>\n",
        ),
        TagShape,
    ),
    "a list in YAML": (
        "<acts>\n"
        + EACH.replace(
            "EACH",
            '- name: "{{ f.name }}"\n  with:\n'
            + KEYS.replace("KEY", "    {{ k }}: {{ v|tojson }}\n"),
        )
        + "</acts>",
        TagShape,
    ),
    "attributes": (
        EACH.replace(
            "EACH",
            '<act name="{{ f.name }}"' + KEYS.replace("KEY", f' {{{{ k }}}}="{TEXT}"') + "/>\n",
        ),
        TagShape,
    ),
    "attributes in a block": (
        "<acts>"
        + EACH.replace(
            "EACH",
            '<act name="{{ f.name }}"' + KEYS.replace("KEY", f' {{{{ k }}}}="{ESCAPED}"') + " />",
        )
        + "</acts>",
        TagShape,
    ),
    "CDATA": (
        EACH.replace(
            "EACH",
            '<act name="{{ f.name }}">\n'
            + KEYS.replace("KEY", f'<arg name="{{{{ k }}}}"><![CDATA[{TEXT}]]></arg>\n')
            + "</act>\n",
        ),
        TagShape,
    ),
    "CDATA around text": (
        EACH.replace(
            "EACH",
            "<act={{ f.name }}>"
            + KEYS.replace(
                "KEY",
                "<{{ k }}>{% if v is string %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}"
                "</{{ k }}>",
            )
            + "</act>",
        ),
        TagShape,
    ),
    "fences": (
        EACH.replace(
            "EACH",
            "<|do>call:{{ f.name }}{{ '{' }}"
            + KEYS.replace(
                "KEY",
                "{{ k }}:{% if v is string %}<|q|>{{ v }}<|q|>{% else %}{{ v|tojson }}{% endif %}"
                "{{ ',' if not loop.last }}",
            )
            + "}<do|>",
        ),
        FencedShape,
    ),
}
TOOLS = [
    tool("ferry_times", harbour="string", berths="integer"),
    tool("tide_now"),
    tool("zyx_wvu", place="string", until="string"),
    tool("rqp_ont", place="string"),
]
ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
VALUES = st.text("ab é😀,.:'\"{}[]\\", max_size=12).map(str.strip)


def calls_of(template: str, role: str = TURNS) -> Calls:
    compiled = ENVIRONMENT.from_string(role.replace("CALLS", template))

    def render(made: Sequence[Made] | str) -> str:
        question = {"role": "user", "content": "Hello"}
        if not made:
            return compiled.render(messages=[question])
        answer: dict[str, Any] = {"role": "assistant", "content": made}
        if not isinstance(made, str):
            calls = [
                {"id": "call00001", "function": {"name": name, "arguments": dict(arguments)}}
                for name, arguments in made
            ]
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            return compiled.render(messages=[question, answer])
        except ZeroDivisionError:
            return ""

    return Calls(render)


def format_of(calls: Calls) -> ChatFormat:
    family = derived(calls)
    assert family
    return ChatFormat("derived", family.grammar, family.shape)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_calls_of_a_template_are_read_back(name: str) -> None:
    template, kind = WRITTEN[name]
    calls = calls_of(template)
    format_ = format_of(calls)
    assert type(format_.shape) is kind
    others: list[Sequence[Made]] = [[("tide_now", {})], [("ferry_times", {"berths": -4})]]
    for made in (ONE, TWO, *others):
        message = parse_every_split(format_, calls.text(made), tools=TOOLS)
        assert plain(message) == ("", "", [(each, dict(given)) for each, given in made])


@pytest.mark.parametrize("name", WRITTEN)
@given(harbour=VALUES, berths=st.integers(), twice=st.booleans())
@settings(max_examples=15)
def test_any_value_is_read_back(name: str, harbour: str, berths: int, twice: bool) -> None:
    calls = calls_of(WRITTEN[name][0])
    made = [("ferry_times", {"harbour": harbour, "berths": berths})] * (1 + twice)
    message = parse_every_split(format_of(calls), calls.text(made), tools=TOOLS, count=1)
    assert plain(message) == ("", "", made)


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_can_be_enforced(name: str) -> None:
    format_ = format_of(calls_of(WRITTEN[name][0]))
    tokenizer = byte_tokenizer()
    compiler = quick_compiler_for(tokenizer, format_)
    for seed in range(2):
        spec = ConstraintSpec("calls", tools=tuple(TOOLS[:2]), parallel=seed == 0)
        closer = {TagShape: "</", FencedShape: "<|q|>"}.get(WRITTEN[name][1], "}")
        text = byte_walk(tokenizer, seed, closer).text(compiler.compile(spec))
        message = parse_chat(text, format_, tools=TOOLS)
        assert message.tool_calls, text
        assert not message.content
        assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)


def test_a_template_may_allow_one_call() -> None:
    only = "{% if 1 // (2 - m.tool_calls|length) %}{% endif %}"
    format_ = format_of(calls_of(only + EACH.replace("EACH", f"<fn>{OBJECT}</fn>")))
    assert isinstance(format_.shape, JsonShape)
    assert not format_.shape.several


@pytest.mark.parametrize(
    "template",
    [
        "I call it.",
        "{{ m.tool_calls }}",
        EACH.replace("EACH", "{{ f.arguments|tojson }} for {{ f.name }}"),
        EACH.replace("EACH", "{{ f.name }} {{ f.arguments|tojson }}"),
        EACH.replace(
            "EACH",
            '<act id="{{ loop.index0 }}" name="{{ f.name }}">{{ f.arguments|tojson }}</act>',
        ),
        EACH.replace("EACH", "{{ f.name }}: " + KEYS.replace("KEY", "{{ k }}={{ v }}\n")),
        EACH.replace(
            "EACH", "<act>{{ f.name }} " + KEYS.replace("KEY", "{{ k }} is {{ v }}\n") + "</act>"
        ),
        EACH.replace(
            "EACH", "<act>{{ f.name }} " + KEYS.replace("KEY", "{{ k }}={{ v }} ") + "</act>"
        ),
    ],
)
def test_no_format_is_made_up(template: str) -> None:
    assert derived(calls_of(template)) is None


FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHT = {"open": "<muse>", "close": "</muse>", "content": "text"}
FERRY = ("ferry_times", {"harbour": "Ærø", "berths": 2})
DESCRIBED: dict[str, tuple[dict[str, Any], str]] = {
    "JSON": (
        {
            "open": "<fn>",
            "close": "</fn>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        '<fn>\n{"name": "ferry_times", "arguments": {"harbour": "Ærø", "berths": 2}}\n</fn>',
    ),
    "JSON with other keys": (
        {
            "open": "<fn>",
            "close": "</fn>",
            "content": "json",
            "transform": {
                "function": {"name": "{content.tool_name}", "arguments": "{content.parameters}"}
            },
        },
        '<fn>{"tool_name": "ferry_times", "parameters": {"harbour": "Ærø", "berths": 2}}</fn>',
    ),
    "a list of JSON": (
        {
            "open": "<|acts|>",
            "close": "<|/acts|>",
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{parameters}"}},
            "transform_each": True,
        },
        '<|acts|>[{"name": "ferry_times", "parameters": {"harbour": "Ærø", "berths": 2}}]<|/acts|>',
    ),
    "a name and JSON": (
        {
            "open_pattern": r"<\|to\|>(?P<name>[\w.-]+)\s*<\|with\|>",
            "close": "<|done|>",
            "content": "json",
            "transform": FUNCTION,
        },
        '<|to|>ferry_times<|with|>{"harbour": "Ærø", "berths": 2}<|done|>',
    ),
    "tags": (
        {
            "open_pattern": r"\s*<act>\s*<do=(?P<name>[^>\n]+)>",
            "close_pattern": r"</do>\s*</act>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<with=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</with>"},
            "transform": FUNCTION,
        },
        "<act>\n<do=ferry_times>\n<with=harbour>\nÆrø</with>\n<with=berths>\n2</with>\n</do></act>",
    ),
    "fences": (
        {
            "open_pattern": r"<\|do>call:(?P<name>\w+)",
            "close": "<do|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<|q|>", "<|q|>"]]},
            "transform": FUNCTION,
        },
        "<|do>call:ferry_times{harbour:<|q|>Ærø<|q|>,berths:2}<do|>",
    ),
    "Python": (
        {
            "open": "<|py|>",
            "close": "<|/py|>",
            "content": "python-call-list",
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        "<|py|>[ferry_times(harbour='Ærø', berths=2)]<|/py|>",
    ),
    "a recipient": (
        {
            "open_pattern": r"<\|chan\|>to=functions\.(?P<name>\w+)\s*(?:<\|as\|>json)?<\|msg\|>",
            "close": ["<|call|>", "<|over|>"],
            "content": "json",
            "transform": FUNCTION,
        },
        '<|chan|>to=functions.ferry_times <|as|>json<|msg|>{"harbour": "Ærø", "berths": 2}<|call|>',
    ),
    "an id, and the end of a text": (
        {
            "open_pattern": r"\[CALL\](?P<name>\w+)(?:\[ID\](?P<id>\w+))?\[WITH\]",
            "close_pattern": r"(?=\[CALL\])|$",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
        '[CALL]ferry_times[WITH]{"harbour": "Ærø", "berths": 2}',
    ),
    "a name in the closing tag": (
        {
            "open_pattern": r"<fn:(?P<name>\w+)>",
            "close_pattern": r"</fn(?::\w+)?>",
            "content": "json",
            "transform": FUNCTION,
        },
        '<fn:ferry_times>{"harbour": "Ærø", "berths": 2}</fn:ferry_times>',
    ),
    "values on lines": (
        {
            "open_pattern": r"<act>\s*<do=(?P<name>[^>\n]+)>",
            "close_pattern": r"</do>\s*</act>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<with=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</with>"},
            "transform": FUNCTION,
        },
        "<act>\n<do=ferry_times>\n<with=harbour>\nÆrø\n</with>\n<with=berths>\n2\n</with>\n</do></act>",
    ),
    "one closing tag for two": (
        {
            "open_pattern": r"<act>\s*<do=(?P<name>\w+)>",
            "close": "</act>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<with=(?P<key>\w+)>\s*(?P<value>.*?)\s*</with>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": FUNCTION,
        },
        "<act>\n<do=ferry_times>\n<with=harbour>\nÆrø\n</with>\n<with=berths>2</with>\n</do>\n</act>",
    ),
    "a name before tags": (
        {
            "open_pattern": r"(?:<\|turn\|>bot)?<\|act\|>(?P<name>[A-Za-z_][\w.]*)<\|with\|>",
            "close": ["<|done|>", "<|over|>"],
            "content": "xml-inline",
            "content_args": {"tag_pattern": '<arg name="(?P<key>[^"]+)">(?P<value>.*?)</arg>'},
            "transform": FUNCTION,
        },
        '<|act|>ferry_times<|with|><arg name="harbour">Ærø</arg><arg name="berths">2</arg><|done|>',
    ),
    "keys and values": (
        {
            "open_pattern": r"<act>(?P<name>[^\n<]+)",
            "close": "</act>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<k>(?P<key>[^<]+)</k>\s*<v>(?P<value>.*?)</v>"},
            "transform": FUNCTION,
        },
        "<act>ferry_times\n<k>harbour</k>\n<v>Ærø</v><k>berths</k><v>2</v>\n</act>",
    ),
    "elements": (
        {
            "open_pattern": r'<act name="(?P<name>\w+)">',
            "close": "</act>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": FUNCTION,
        },
        '<act name="ferry_times"><harbour>Ærø</harbour><berths>2</berths></act>',
    ),
    "attributes": (
        {
            "open_pattern": r'<act name="(?P<name>\w+)"',
            "close": "/>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r'(?P<key>\w+)="(?P<value>[^"]*)"'},
            "transform": FUNCTION,
        },
        '<act name="ferry_times" harbour="Ærø" berths="2" />',
    ),
    "lines": (
        {
            "open_pattern": r"<act>(?P<name>\w+)\n",
            "close": "</act>",
            "content": "kv-lines",
            "transform": FUNCTION,
        },
        "<act>ferry_times\nharbour: Ærø\nberths:2\n</act>",
    ),
    "lines of JSON": (
        {
            "open_pattern": r'<act name="(?P<name>\w+)">\s*',
            "close": "</act>",
            "content": "kv-lines",
            "content_args": {"kv_sep": "=", "value_parser": {"name": "json"}},
            "transform": FUNCTION,
        },
        '<act name="ferry_times">\nharbour="Ærø"\nberths = 2\n</act>',
    ),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_response_template_is_followed(name: str) -> None:
    field, text = DESCRIBED[name]
    template = {"fields": {"thinking": THOUGHT, "tool_calls": field, "content": {}}}
    format_ = chat_format("{{ messages }}", (), response_template=template)
    message = parse_every_split(format_, f"<muse>So.</muse>\n{text}", tools=TOOLS)
    assert plain(message) == ("", "So.", [FERRY])
    assert transformers_read(template, text) == [FERRY]


def transformers_read(template: dict[str, Any], text: str) -> list[Made]:
    """The calls that transformers finds with the same template."""
    whole = {"start_anchor": "<|turn|>", "defaults": {}, **template}
    tools = [json.loads(json.dumps(each)) for each in TOOLS]
    message = parse_response(text, whole, prefix="", tools=tools)
    calls = message["tool_calls"]
    functions = [each["function"] for each in (calls if isinstance(calls, list) else [calls])]
    return [(each["name"], each["arguments"]) for each in functions]


def test_the_tags_of_an_answer_are_no_part_of_it() -> None:
    fields = {
        "thinking": {"open": ["<muse>", "<ponder>"], "close": ["</muse>", "</ponder>"]},
        "content": {"open": "<|say|>", "close_pattern": r"\s*(?:<\|said\|>|<\|over\|>)"},
        "tool_calls": DESCRIBED["JSON"][0],
    }
    format_ = chat_format("{{ messages }}", (), response_template={"fields": fields})
    for name in ("muse", "ponder"):
        text = f"<{name}>So.</{name}><|say|>Hm.<|said|>{DESCRIBED['JSON'][1]}"
        message = parse_every_split(format_, text, tools=TOOLS)
        assert plain(message) == ("Hm.", "So.", [FERRY])


def test_a_known_family_is_kept_beside_a_response_template() -> None:
    template = {"fields": {"thinking": THOUGHT, "tool_calls": DESCRIBED["Python"][0]}}
    format_ = chat_format("<tool_call>", (), response_template=template)
    assert format_.name == "hermes"
    assert format_.reasoning_markers == ("<muse>", "</muse>")


@pytest.mark.parametrize(
    "template",
    [None, "x", {}, {"fields": []}, {"fields": {"tool_calls": {"open_pattern": "(a|b)[cd]"}}}],
)
def test_a_response_template_that_is_not_understood_is_ignored(template: Any) -> None:
    assert described(template) is None
    assert chat_format("<tool_call>", (), response_template=template).name == "hermes"


def test_empty_reasoning_before_calls_shows_its_tags() -> None:
    format_ = format_of(calls_of(WRITTEN["after reasoning"][0]))
    text = '<ponder>Which?</ponder><fn>{"name": "tide_now", "arguments": {}}</fn>'
    message = parse_every_split(format_, text, tools=TOOLS)
    assert plain(message) == ("", "Which?", [("tide_now", {})])


def test_arguments_in_a_string_are_read_but_not_enforced() -> None:
    written = '{"name": "{{ f.name }}", "arguments": {{ f.arguments|tojson|tojson }}}'
    calls = calls_of(EACH.replace("EACH", f"<fn>{written}</fn>"))
    format_ = format_of(calls)
    for made in (ONE, TWO, [("ferry_times", {"harbour": 'Æ"rø', "berths": -4})]):
        message = parse_every_split(format_, calls.text(made), tools=TOOLS)
        assert plain(message) == ("", "", [(each, dict(given)) for each, given in made])
    spec = ConstraintSpec("calls", tools=tuple(TOOLS[:2]))
    with pytest.raises(InvalidRequest, match="in a JSON string: require no call"):
        quick_compiler_for(byte_tokenizer(), format_).compile(spec)


def test_keys_with_more_than_brackets_in_closing_tags_are_not_derived() -> None:
    """The first key would become a part of every value's end."""
    keys = KEYS.replace("KEY", f"<a:{{{{ k }}}}>{TEXT}</a:{{{{ k }}}}>")
    template = EACH.replace("EACH", f"<fn={{{{ f.name }}}}>{keys}</fn>")
    assert derived(calls_of(template)) is None
