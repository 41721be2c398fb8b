"""Reads GatewaySettings from the command line and the environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from common.user_path import user_path
from common.version import VERSION
from gateway.settings import GatewaySettings, Rule, is_loopback

KEYS_VARIABLE = "MLX_GATEWAY_API_KEYS"
_KEY_FILE_VARIABLE = "MLX_GATEWAY_API_KEY_FILE"
KEY_FILE = "File of keys, `KEY` or `NAME KEY` per line; lines that begin with # are skipped."
_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHORTEST_KEY = 8  # characters: catches typing errors, and does not measure strength
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d+)?|\.\d+)\s*(ms|s|m|h|d)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class BadArgument(Exception):
    """A setting cannot be used; `str()` says which one and why."""


def settings_from(arguments: Sequence[str], environ: Mapping[str, str]) -> GatewaySettings:
    """Return the settings of a command line and an environment. Raises BadArgument."""
    flags = [*_of_environment(environ), *arguments]
    try:
        given = _COMMAND.main(flags, "gateway", standalone_mode=False)
    except click.ClickException as problem:
        raise BadArgument(problem.format_message()) from None
    if not isinstance(given, dict):  # the exit code of --help and --version
        raise SystemExit(given)
    values = {row.name: _value(row, given[row.name]) for row in fields(GatewaySettings)}
    keys = (*values["api_keys"], *_keys_beside(given["api_key_file"], environ))
    values["api_keys"] = tuple(dict.fromkeys(_key(key) for key in keys))
    values["cors_origins"] = tuple(_origin(text) for text in values["cors_origins"])
    settings = GatewaySettings(**values)
    _check(settings)
    return settings


def _of_environment(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of the environment as flags, before which the command line's apply."""
    flags, known = [], {"MLX_GATEWAY_LOG", _KEY_FILE_VARIABLE}
    for row in fields(GatewaySettings):
        name, kind = f"MLX_GATEWAY_{row.name.upper()}", row.metadata["rule"].kind
        text = environ.get(name, "").strip()
        known.add(name)
        if not text or kind == "keys":  # read elsewhere, because keys must not appear in a message
            continue
        if kind == "switch":
            if text.lower() not in ("true", "false", "1", "0"):
                raise BadArgument(f"{name} is {text!r}: give true or false")
            flags += [flag_of(row)] if text.lower() in ("true", "1") else []
        else:
            parts = text.split(",") if kind == "texts" else [text]
            flags += [f"{flag_of(row)}={part.strip()}" for part in parts]
    if file := environ.get(_KEY_FILE_VARIABLE):
        flags.append(f"--api-key-file={file}")
    for name in environ:  # a misspelled API_KEYS would leave the gateway without a key
        if name.startswith("MLX_GATEWAY_") and name not in known:
            raise BadArgument(f"{name} is not a setting: see `--help`, or unset it")
    return flags


def flag_of(row: Field[Any]) -> str:
    """Return a setting's flag, such as `--max-body-bytes`.

    A setting that may be repeated has its flag in the singular.
    """
    name = "--" + row.name.replace("_", "-")
    return name.removesuffix("s") if row.metadata["rule"].kind in ("texts", "keys") else name


def default_of(row: Field[Any]) -> str:
    """Return a setting's default, as users write it; "" if it has none."""
    kind: str = row.metadata["rule"].kind
    default: Any = row.default
    if kind == "switch":
        return "on" if default else "off"
    if default in (None, "", ()):
        return "by device" if kind == "bytes" else ""
    if kind == "bytes":
        return f"{default >> 20} MiB"
    return f"{default:g} s" if kind == "seconds" and default else f"{default}".removesuffix(".0")


def gateway_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the gateway's flags; their values are strings, which `settings_from` reads."""
    command = click.option("--api-key-file", help=KEY_FILE, metavar="FILE")(command)
    for row in reversed(fields(GatewaySettings)):
        rule: Rule = row.metadata["rule"]
        repeated, default = rule.kind in ("texts", "keys"), default_of(row)
        word = flag_of(row).rpartition("-")[2] if repeated else rule.kind
        command = click.option(
            flag_of(row),
            row.name,
            is_flag=rule.kind == "switch",
            multiple=repeated,
            metavar=None if rule.kind == "switch" else word.upper(),
            help=f"{rule.meaning} [default: {default}]" if default else rule.meaning,
        )(command)
    return command


@click.command()
@click.version_option(VERSION, message="%(prog)s %(version)s")
@gateway_options
def _COMMAND(**given: Any) -> dict[str, Any]:
    """Serve MLX models over HTTP, with the APIs of OpenAI, Anthropic and Ollama."""
    return given


def _value(row: Field[Any], given: Any) -> Any:
    """Convert what the command line contains for a setting. Raises BadArgument."""
    rule: Rule = row.metadata["rule"]
    flag = flag_of(row)
    if given is None:
        return row.default
    if rule.kind == "path":
        return _folder(flag, given)
    if rule.kind not in ("bytes", "seconds", "count"):
        return given
    value = _number(flag, rule, given)
    if not rule.minimum <= value <= rule.maximum:
        most = f" and at most {rule.maximum:g}" if rule.maximum < 1e15 else ""
        raise BadArgument(f"{flag} is {given}: give at least {rule.minimum:g}{most}")
    return value


def _number(flag: str, rule: Rule, text: str) -> float:
    if rule.kind == "bytes":
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise BadArgument(f"{flag} is {text!r}: give bytes, or a size such as 50MiB")
        return int(float(match[1]) * 2 ** _POWERS[(match[2] or "").upper()])
    if rule.kind == "seconds":
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise BadArgument(f"{flag} is {text!r}: give seconds, or a time such as 5m or 2h")
        return float(match[1]) * _SECONDS[match[2] or "s"]
    try:
        return int(text)
    except ValueError:
        raise BadArgument(f"{flag} is {text!r}: give a whole number") from None


def _folder(flag: str, text: str) -> Path:
    folder = user_path(text).resolve()
    if not folder.is_dir():
        raise BadArgument(f"{flag} is {text!r}: there is no such folder")
    return folder


def _keys_beside(file: str | None, environ: Mapping[str, str]) -> list[str]:
    keys = [key.strip() for key in environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    if file is None:
        return keys
    try:
        lines = [line.strip() for line in Path(file).read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise BadArgument(f"--api-key-file {file} cannot be read: give a text file") from None
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise BadArgument(f"--api-key-file {file} has no key: write one per line")
    return keys + found


def _key(text: str) -> str:
    """Return a key, or a name and a key separated by a space. Raises BadArgument."""
    # The key itself is left out of the message, which ends up in logs and on screens.
    *names, key = text.split(" ")
    if len(names) > 1 or not all(map(_KEY_NAME.fullmatch, names)):
        raise BadArgument(
            "an API key contains a space, which may only separate a name from its key: write one"
            " key, or a name of letters, digits, '.', '_' and '-' before it"
        )
    if len(key) < _SHORTEST_KEY:
        raise BadArgument(f"an API key is shorter than {_SHORTEST_KEY} characters: use another")
    if not key.isascii() or not key.isprintable():
        raise BadArgument("an API key contains characters that HTTP headers cannot: use ASCII")
    return text


def _origin(text: str) -> str:
    """Return an origin as browsers send it: scheme, host, and any port that is not the default."""
    if text in ("*", "null"):  # the origin of local files and sandboxed pages
        return text
    parts = urlsplit(text.strip().rstrip("/").lower())
    # Extensions and desktop programs have their own schemes: app://, chrome-extension://.
    if not parts.scheme or not parts.hostname or parts.path or parts.query:
        raise BadArgument(f"--cors-origin is {text!r}: give one such as http://localhost:3000")
    return f"{parts.scheme}://{parts.netloc}"


def _check(settings: GatewaySettings) -> None:
    if not (settings.models_dir or settings.model):
        raise BadArgument("nothing to serve: give --models-dir FOLDER, or --model with a model")
    if settings.models_dir and settings.model:
        raise BadArgument(
            f"--model is {settings.model!r} and --models-dir is {str(settings.models_dir)!r}: give"
            " only one of them"
        )
    if settings.models_dir and settings.model_settings:
        raise BadArgument("--model-setting belongs to --model: write it into the model's own file")
    if not settings.host:
        raise BadArgument("--host is empty: give an address, such as 127.0.0.1 for this machine")
    if not settings.api_keys:
        if settings.host != "localhost" and not is_loopback(settings.host):
            raise BadArgument(
                f"--host {settings.host} can be reached by others, and there is no API key: set"
                f" {KEYS_VARIABLE} or --api-key-file, or listen on 127.0.0.1"
            )
        if "*" in settings.cors_origins:
            raise BadArgument(
                "--cors-origin * lets every web page call this gateway, and there is no API key:"
                f" set {KEYS_VARIABLE} or --api-key-file, or name the origins"
            )
