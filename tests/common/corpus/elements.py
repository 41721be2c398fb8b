"""MiniMax M3's elements inside elements."""

from __future__ import annotations

from tests.common.corpus import Call, Case, tool

_MARK = "]<]minimax[>["
A_FERRY: Call = ("ferry_times", {"harbour": "Ærø"})
A_TIDE: Call = ("tide_now", {})


def _element(key: str, *inside: str) -> str:
    return f"{_MARK}<{key}>{''.join(inside)}{_MARK}</{key}>"


def _call(name: str, *arguments: str) -> str:
    return f'{_MARK}<invoke name="{name}">{"".join(arguments)}{_MARK}</invoke>\n'


def _block(*calls: str) -> str:
    return f"{_MARK}<tool_call>\n{''.join(calls)}{_MARK}</tool_call>"


def _nested(levels: int) -> str:
    return f"{_MARK}<a>" * levels + f"{_MARK}</a>" * levels


_FERRY, _TIDE = _call("ferry_times", _element("harbour", "Ærø")), _call("tide_now")
_FARES = tool(
    "fares",
    stops={
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"pier": {"type": "string"}, "wait": {"type": "integer"}},
        },
    },
    limit={"oneOf": [{"type": "integer"}, {"properties": {"most": {"type": "integer"}}}]},
    labels={"type": "object", "additionalProperties": {"type": "string"}},
    item="string",
)


def _fares(*arguments: str) -> str:
    return _block(_call("fares", *arguments))


def _typed(why: str, text: str, **arguments: object) -> Case:
    return Case(why, text, calls=[("fares", arguments)], tools=[_FARES])


M3 = [
    Case("thinking", f"<mm:think>So.</mm:think>{_block(_FERRY)}", "", "So.", [A_FERRY]),
    Case("no thinking", "</mm:think>Hm.", "Hm."),
    Case("two", f"Hm.\n{_block(_FERRY, _TIDE)}", "Hm.", calls=[A_FERRY, A_TIDE]),
    Case("no block", _FERRY, calls=[A_FERRY]),
    Case("no end of the block", f"{_MARK}<tool_call>\n{_FERRY}", calls=[A_FERRY]),
    Case(
        "scalars",
        _block(
            _call(
                "book_cabin",
                _element("berths", "2"),
                _element("pets", "true"),
                _element("remark", "null"),
                _element("code", "07\n"),
            )
        ),
        calls=[("book_cabin", {"berths": 2, "pets": True, "remark": None, "code": "07\n"})],
    ),
    Case(
        "entries",
        _block(_call("book_cabin", _element("guests", _element("item", "Bo"), _element("item")))),
        calls=[("book_cabin", {"guests": ["Bo", ""]})],
    ),
    Case(
        "no entries",
        _block(_call("book_cabin", _element("guests"))),
        calls=[("book_cabin", {"guests": []})],
    ),
    Case(
        "JSON",
        _block(_call("book_cabin", _element("route", '{"a": [1]}'))),
        calls=[("book_cabin", {"route": {"a": [1]}})],
    ),
    Case(
        "a member twice",
        _block(_call("book_cabin", _element("route", _element("a", "x"), _element("a", "y")))),
        calls=[("book_cabin", {"route": {"a": ["x", "y"]}})],
    ),
    _typed(
        "objects in a list",
        _fares(
            _element(
                "stops",
                _element("item", _element("pier", "7"), _element("wait", "010")),
                _element("item", _element("pier", "B")),
            )
        ),
        stops=[{"pier": "7", "wait": 10}, {"pier": "B"}],
    ),
    _typed("one of two types", _fares(_element("limit", "5")), limit=5),
    _typed("the other", _fares(_element("limit", _element("most", "5"))), limit={"most": 5}),
    _typed("any member", _fares(_element("labels", _element("item", "1"))), labels={"item": "1"}),
    _typed("an argument named like an entry", _fares(_element("item", "1")), item="1"),
    Case("no end of a call", _FERRY.removesuffix(f"{_MARK}</invoke>\n"), calls=[A_FERRY]),
    Case("text among elements", (text := _block(_call("tide_now", "x"))), text),
    Case("a marker alone", f"Hm. {_MARK}<tool_ca", f"Hm. {_MARK}<tool_ca"),
    Case("a marker, cut", f"Hm.\n{_MARK}<tool_ca", "Hm.", cut=True),
    Case("cut", _block(_FERRY)[:80], cut=True),
    Case("too deep", (deep := _block(_call("f", _nested(60)))), deep),
]
