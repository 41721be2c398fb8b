"""`python -m terminal`: finds a gateway, or starts one, and talks to a model."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from terminal import own_gateway
from terminal.chat import Chat
from terminal.client import ChatFailed, Client
from terminal.conversation import Conversation
from terminal.screen import Screen

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "MLX_GATEWAY_API_KEY"


def main() -> int:
    """One conversation; the exit code is 1 if the last answer could not be had."""
    given = _arguments()
    # A script's background jobs inherit that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    with contextlib.suppress(ImportError):  # it edits the line that input() reads
        import readline  # noqa: F401
    screen = Screen()
    try:
        with contextlib.ExitStack() as resources:
            client = resources.enter_context(Client(_address(given, resources, screen), _key()))
            conversation = _conversation(given, client)
            if screen.interactive:
                screen.note(f"{conversation.model} at {client.url}; /help lists the commands")
            chat = Chat(client, conversation, screen)
            chat.run()
            return int(chat.failed)
    except ChatFailed as error:
        screen.trouble(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chat", description=f"Talk to a model. An API key is read from {KEY_VARIABLE}."
    )
    parser.add_argument(
        "--url", default="", help=f"a running gateway (default: {DEFAULT_URL}, if one is there)"
    )
    parser.add_argument(
        "--models-dir", type=Path, help="where none is running, start one on this folder"
    )
    parser.add_argument("--model", default="", help="whom to talk to (default: the first)")
    parser.add_argument("--system", default="", help="system prompt")
    return parser.parse_args()


def _key() -> str:
    return os.environ.get(KEY_VARIABLE, "")


def _address(given: argparse.Namespace, resources: contextlib.ExitStack, screen: Screen) -> str:
    if given.url:
        return str(given.url)
    with Client(DEFAULT_URL, _key()) as usual:
        if usual.answers():
            return DEFAULT_URL
    if given.models_dir is None:
        raise ChatFailed(
            f"no gateway answers at {DEFAULT_URL}: start one with `make serve`, name another with"
            " --url, or name a folder of models with --models-dir to have one started"
        )
    screen.note("starting a gateway")
    return resources.enter_context(own_gateway.started(given.models_dir))


def _conversation(given: argparse.Namespace, client: Client) -> Conversation:
    names = client.models()
    if not names:
        raise ChatFailed("the gateway has no models: put a YAML file into its models folder")
    if given.model and given.model not in names:
        raise ChatFailed(f"there is no model {given.model!r}: there are {', '.join(names)}")
    return Conversation(given.model or names[0], given.system)


def _ended(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
