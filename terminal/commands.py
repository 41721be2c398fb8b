"""The lines that begin with a slash: what they are called, and what they do to a conversation.

Everything here changes the conversation and says one line about it; nothing is sent or printed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from terminal.conversation import Conversation

_IMAGE_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
}
_NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
}


class BadCommand(Exception):
    """Why a command was not carried out, in one sentence."""


@dataclass(frozen=True, slots=True)
class Session:
    """What a command may look at and change."""

    conversation: Conversation
    models: Callable[[], Sequence[str]]


def _model(session: Session, name: str) -> str:
    names = session.models()
    chosen = session.conversation.model
    if not name:
        return "\n".join(f"{'*' if one == chosen else ' '} {one}" for one in names)
    if name not in names:
        raise BadCommand(f"there is no model {name!r}: /model lists those that there are")
    session.conversation.model = name
    return f"now talking to {name}"


def _system(session: Session, text: str) -> str:
    session.conversation.system = text
    return "the system prompt is set" if text else "there is no system prompt now"


def _image(session: Session, name: str) -> str:
    path = Path(name).expanduser()
    kind = _IMAGE_TYPES.get(path.suffix.lower())
    if not name or kind is None:
        raise BadCommand("/image takes the path of a .png, .jpg, .webp or .gif")
    encoded = base64.b64encode(_read(path)).decode()
    session.conversation.images.append(f"data:{kind};base64,{encoded}")
    return f"{path.name} goes with the next message"


def _tools(session: Session, name: str) -> str:
    if not name:
        session.conversation.tools = []
        return "there are no tools now"
    try:
        tools = json.loads(_read(Path(name).expanduser()))
        names = [tool["function"]["name"] for tool in tools]
    except (ValueError, TypeError, KeyError):
        raise BadCommand(f"{name} is not a JSON list of tools in OpenAI's form") from None
    session.conversation.tools = tools
    return f"the model may call {', '.join(names)}"


def _set(session: Session, text: str) -> str:
    settings = session.conversation.settings
    name, _, value = text.partition(" ")
    value = value.strip()
    if not name:
        return (
            "\n".join(f"{key} {json.dumps(given)}" for key, given in settings.items())
            or "all unset"
        )
    if name == "thinking":
        if value not in ("", "on", "off"):
            raise BadCommand("thinking is on or off; nothing leaves it to the model")
        settings.pop("chat_template_kwargs", None)
        if value:
            settings["chat_template_kwargs"] = {"enable_thinking": value == "on"}
        return f"thinking is {value or 'the model’s own'}"
    if name not in _NUMBERS:
        raise BadCommand(f"{name!r} is no setting: {', '.join((*_NUMBERS, 'thinking'))}")
    settings.pop(name, None)
    if value:
        try:
            settings[name] = _NUMBERS[name](value)
        except ValueError:
            raise BadCommand(f"{name} is not {value!r}: give a number") from None
    return f"{name} is {value or 'the model’s own'}"


def _new(session: Session, _: str) -> str:
    session.conversation.messages.clear()
    session.conversation.images.clear()
    return "a new conversation"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCommand(f"{path} cannot be read: {error.strerror}") from None


COMMANDS: dict[str, tuple[str, str, Callable[[Session, str], str]]] = {
    "model": ("[NAME]", "talk to another model; alone: list them", _model),
    "system": ("[TEXT]", "set the system prompt; alone: remove it", _system),
    "set": ("[NAME [VALUE]]", "temperature, top_p, top_k, min_p, max_tokens, seed, thinking", _set),
    "image": ("PATH", "attach an image to the next message", _image),
    "tools": ("[PATH]", "offer the tools of a JSON file; alone: none", _tools),
    "new": ("", "forget the conversation", _new),
}


def help_text() -> str:
    """All commands, one to a line."""
    rows = [
        (f"/{name} {shape}".rstrip(), meaning) for name, (shape, meaning, _) in COMMANDS.items()
    ]
    rows += [
        ("/retry", "answer the last question again"),
        ("/help", "this list"),
        ("/quit", "leave, as Ctrl-D does"),
    ]
    width = max(len(row[0]) for row in rows)
    lines = [f"{shape:<{width}}  {meaning}" for shape, meaning in rows]
    return "\n".join([*lines, "Ctrl-C stops an answer. A line that ends in \\ goes on."])


def carry_out(session: Session, line: str) -> str:
    """Do what a line such as `/model tiny` says. Raises BadCommand."""
    name, _, rest = line.removeprefix("/").partition(" ")
    if name not in COMMANDS:
        raise BadCommand(f"there is no command /{name}: /help lists them")
    return COMMANDS[name][2](session, rest.strip())
