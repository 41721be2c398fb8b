"""A small tokenizer in Mistral's own format, and conversations that all its versions can render."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

VERSIONS = ("v3", "v7", "v11", "v13")
_SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
]
_OLD = 20  # special tokens that tekken.json did not name before v7
_PIECES = [b"he", b"ll", b"hell", b"hello", b'":', b' "', b'{"', b"\n\n", b", "]


def write_tekken(path: Path, version: str, *, named: bool = True) -> Path:
    """Write tekken.json into the folder. named: whether it names its special tokens."""
    special = _SPECIAL if named else _SPECIAL[:_OLD]
    pieces = [*(bytes([value]) for value in range(256)), *_PIECES]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + len(special),
        "default_num_special_tokens": len(special),
        "version": version,
    }
    whole: dict[str, Any] = {"config": config, "vocab": vocabulary}
    if named:
        whole["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ]
    (path / "tekken.json").write_text(json.dumps(whole))
    return path


def _call(name: str, arguments: str, number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _result(text: str, number: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "name": "look", "content": text}


def _calls(*calls: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls)}


_SYSTEM = {"role": "system", "content": "Be kind."}
_LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks somewhere: où, 好的.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "again": {"type": "boolean"}},
            "required": ["at"],
        },
    },
}
_BARE = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}
_STRICT = {"type": "function", "function": {**_LOOK["function"], "strict": True}}
_FIRST, _SECOND = "abc123def", "ghi456jkl"
_ASKED = _calls(_call("look", '{"at":"it","again":true}', _FIRST))

Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]]]

CONVERSATIONS: dict[str, Conversation] = {
    "one question": ([_user("hello")], []),
    "a system prompt": ([_SYSTEM, _user("hello\n\nyou")], []),
    "several turns": (
        [_SYSTEM, _user("hello"), _assistant("Hello, you. "), _user("And?")],
        [],
    ),
    "two questions in a row": ([_user("hello"), _user("you"), _assistant("A"), _user("b")], []),
    "several texts": (
        [{"role": "user", "content": [{"type": "text", "text": one} for one in ("a", "b c")]}],
        [],
    ),
    "tools": ([_SYSTEM, _user("hello"), _assistant("A"), _user("where?")], [_LOOK, _BARE]),
    "a strict tool": ([_user("where?")], [_STRICT]),
    "a call": ([_user("where?"), _ASKED, _result("there, où", _FIRST)], [_LOOK]),
    "a result in JSON": (
        [
            _user("where?"),
            _ASKED,
            _result('{"x":1,"y":["où"]}', _FIRST),
            _assistant("There."),
            _user("sure?"),
        ],
        [_LOOK],
    ),
    "a number": ([_user("where?"), _ASKED, _result("42", _FIRST)], [_LOOK]),
    "no result": ([_user("where?"), _ASKED, _result("", _FIRST)], [_LOOK]),
    "no arguments": (
        [_user("where?"), _calls(_call("wait", "", _FIRST)), _result("done", _FIRST)],
        [_BARE],
    ),
    "two calls": (
        [
            _user("where?"),
            _calls(_call("look", '{"at": "好"}', _FIRST), _call("look", '{"at": "it"}', _SECOND)),
            _result("one", _FIRST),
            _result("two", _SECOND),
            _assistant("There."),
            _user("hello"),
        ],
        [_LOOK],
    ),
    "results in another order": (
        [
            _user("where?"),
            _calls(_call("look", '{"at": "a"}', _FIRST), _call("look", '{"at": "b"}', _SECOND)),
            _result("two", _SECOND),
            _result("one", _FIRST),
        ],
        [_LOOK],
    ),
    "a text beside a call": (
        [_user("where?"), {**_ASKED, "content": "I look."}, _result("there", _FIRST)],
        [_LOOK],
    ),
}
