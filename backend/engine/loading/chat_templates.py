"""Finds a checkpoint's chat template, in any file where transformers or mlx-lm stores templates.

A few families have no template, because their processors write the prompt around one question.
`templates/` has templates for them.

Tokenizers in Mistral's format (a `tekken.json`) often have no template either. transformers reads
their vocabulary. Only mistral-common knows the names of the special tokens and the format of
conversations; this module follows its instruct tokenizers v3 to v13 (`tests/engine/tekken` compares
the tokens).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backend.engine.errors import Unusable
from backend.engine.loading.folder import read_object
from common.template_files import OF_PROCESSORS, OF_TOKENIZER, template_in

# Settings that name a module of mlx-lm, and the package of that module.
_MODULES = {
    "chat_template_type": "mlx_lm.chat_templates",
    "tool_parser_type": "mlx_lm.tool_parsers",
}
# PaliGemma has no roles. GOT-OCR was trained with one question after its system message.
_TEMPLATES = Path(__file__).parent / "templates"
_OF_FAMILIES = ("got", "paligemma")
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_TEMPLATE = Path(__file__).parent / "templates" / "tekken.jinja"
_APART = "\n\n"  # between merged texts or messages
_SORTS = 11  # from this version on, results are sorted in the order of their calls
_SEVENTH = 7  # before this version, the system prompt is in the last question, and results are JSON
Message = dict[str, Any]


def template_arguments(path: Path, model_type: str) -> dict[str, Any]:
    """Return the arguments that give a tokenizer its template; empty if none are needed.

    A module that a checkpoint names is ignored if the installed mlx-lm does not have it.
    """
    arguments: dict[str, Any] = {}
    stated = _object_in(path / OF_TOKENIZER)
    for key, package in _MODULES.items():
        name = stated.get(key)
        if name and not (str(name).isidentifier() and find_spec(f"{package}.{name}")):
            arguments[key] = None
    if not _in_a_file(path):
        own = template_in(stated)
        template = own or _template_of_processor(path)
        if not template and model_type.lower() in _OF_FAMILIES:
            template = (_TEMPLATES / f"{model_type.lower()}.jinja").read_text().strip()
        if template or own != stated.get("chat_template"):
            arguments["chat_template"] = template or own
    return arguments


def _in_a_file(path: Path) -> bool:
    return (path / "chat_template.jinja").exists() or (path / "additional_chat_templates").is_dir()


def _template_of_processor(path: Path) -> Any:
    stated = (template_in(_object_in(path / name)) for name in OF_PROCESSORS)
    return next(filter(None, stated), None)


def _object_in(file: Path) -> dict[str, Any]:
    """Return the object in a file; {} for a broken file, which a library will report later."""
    try:
        return read_object(file)
    except (Unusable, OSError):
        return {}


def of_tekken(path: Path) -> dict[str, Any]:
    """Return the arguments that transformers needs to load a folder's `tekken.json`.

    They are empty if the folder has a `tokenizer.json`, or no `tekken.json`. Raises ValueError for
    a file of the oldest format.
    """
    tekken = _tekken(path)
    if tekken is None:
        return {}
    if "special_tokens" not in tekken:
        raise ValueError("its tekken.json does not name its special tokens")
    known = _special(tekken)
    arguments: dict[str, Any] = {name: text for name, text in _NAMES.items() if text in known}
    if _is_written_here(path, known):
        arguments["chat_template"] = _TEMPLATE.read_text().replace("VERSION", str(_version(tekken)))
    return arguments


def settle_chats(tokenizer: Any, path: Path) -> None:
    """Let a tokenizer of mlx-lm that uses this module's template render as mistral-common does."""
    tekken = _tekken(path)
    if tekken is None or not _is_written_here(path, _special(tekken)):
        return
    version = _version(tekken)

    def render(messages: Any, *, tools: Any = None, **arguments: Any) -> Any:
        return tokenizer._tokenizer.apply_chat_template(
            settled_messages(messages, version),
            tools=settled_tools(tools),
            **arguments | {"tokenize": False},
        )

    tokenizer._chat_template = render


def _tekken(path: Path) -> dict[str, Any] | None:
    file = path / "tekken.json"
    if (path / "tokenizer.json").exists() or not file.is_file():
        return None
    tekken: dict[str, Any] = json.loads(file.read_bytes())
    return tekken


def _special(tekken: dict[str, Any]) -> set[str]:
    return {token["token_str"] for token in tekken.get("special_tokens") or ()}


def _version(tekken: dict[str, Any]) -> int:
    number = re.search(r"\d+", str(tekken["config"].get("version", "")))
    return int(number[0]) if number else 3


def _is_written_here(path: Path, special: set[str]) -> bool:
    stated = template_in(_object_in(path / OF_TOKENIZER)) or _template_of_processor(path)
    return "[INST]" in special and not (stated or _in_a_file(path))


def settled_messages(messages: Iterable[Mapping[str, Any]], version: int) -> list[Message]:
    """Return the messages in the order and form in which mistral-common renders them.

    It merges neighbouring messages of the same role, gives JSON uniform spacing, and writes only
    some fields of tools.
    """
    settled: list[Message] = []
    for role, group in itertools.groupby(messages, lambda message: message.get("role")):
        together = list(group)
        if role == "user":
            settled.append({"role": role, "content": _content(together)})
        elif role == "assistant":
            settled.append(_assistant(together))
        elif role == "tool":
            calls = settled[-1].get("tool_calls") if settled else None
            settled += _results(together, calls or (), version)
        elif version >= _SEVENTH:
            settled += [{**message, "content": _content([message])} for message in together]
        else:
            settled += map(dict, together)
    if version >= _SEVENTH:
        return settled
    system = [message for message in settled if message.get("role") in ("system", "developer")]
    texts = [text for message in system if (text := _content([message]))]
    first = [{"role": "system", "content": _APART.join(map(str, texts))}] if texts else []
    return [*first, *(message for message in settled if message not in system)]


def settled_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools with only the fields that mistral-common writes, in the same order."""
    if not tools:
        return None
    functions = [tool.get("function") or {} for tool in tools]
    return [
        {
            "type": "function",
            "function": {
                "name": function.get("name"),
                "description": function.get("description") or "",
                "parameters": function.get("parameters") or {},
            },
        }
        for function in functions
    ]


def _content(messages: Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """Merge the contents of messages: to a string, or to parts if a part is not text."""
    parts: list[Any] = []
    for message in messages:
        content = message.get("content") or ()
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            text = part.get("text") if part.get("type") == "text" else None
            if text is None:
                parts.append(part)
            elif text and parts and parts[-1].get("type") == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + _APART + text}
            elif text:
                parts.append({"type": "text", "text": text})
    if all(part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _assistant(messages: Sequence[Mapping[str, Any]]) -> Message:
    content = _content(messages)
    if isinstance(content, str):
        content = content.rstrip(" ")
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
        for message in messages
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    return _read(arguments or "{}") if isinstance(arguments, str | None) else arguments


def _results(
    messages: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]], version: int
) -> list[Message]:
    results = [{**message, "content": _content([message])} for message in messages]
    if version < _SEVENTH:  # a result is embedded in JSON text
        results = [{**result, "content": _read(result["content"] or "{}")} for result in results]
    if version >= _SORTS:
        order = {call.get("id"): at for at, call in enumerate(calls)}
        results.sort(key=lambda result: order.get(result.get("tool_call_id"), len(order)))
    return results


def _read(text: Any) -> Any:
    """Return the value of a JSON string; the argument itself if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text
