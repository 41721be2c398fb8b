"""Defines the options of the commands that load a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import click

from gateway.arguments import flag_of
from gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ModelOption:
    """A command-line option that sets a key of the model file."""

    flag: str
    key: str  # its path, such as `parameters.temperature`
    metavar: str
    meaning: str
    kind: click.ParamType[Any] = click.STRING

    @property
    def name(self) -> str:
        """The name of the command's argument."""
        return "model_" + self.flag.removeprefix("--").replace("-", "_")


MODEL_OPTIONS = (
    ModelOption(
        *("--context-size", "context_size", "TOKENS"),
        "Maximum tokens of prompt and answer together. [default: as many as fit in memory]",
        click.IntRange(0),
    ),
    ModelOption(
        *("--parallel", "engine_args.parallel", "COUNT"),
        "Maximum number of answers at a time. [default: 32]",
        click.IntRange(1, 256),
    ),
    ModelOption(
        *("--temperature", "parameters.temperature", "NUMBER"),
        "Sampling temperature of requests that set none; 0 always picks the most likely token."
        " [default: the checkpoint's, or 1]",
        click.FloatRange(0, 100),
    ),
    ModelOption(
        *("--max-tokens", "parameters.max_tokens", "TOKENS"),
        "Maximum length of an answer if the request sets none. [default: the rest of the context]",
        click.IntRange(1),
    ),
    ModelOption(
        *("--kv-bits", "engine_args.kv_bits", "BITS"),
        "Bits per value of the KV cache: 2, 3, 4, 5, 6 or 8. [default: the model's own type]",
        click.IntRange(2, 8),
    ),
    ModelOption(
        *("--draft-model", "draft_model", "MODEL"),
        "A smaller model that drafts tokens: a folder or a hub id. [default: none]",
    ),
    ModelOption(
        *("--adapter", "lora_adapter", "ADAPTER"),
        "A LoRA adapter of mlx-lm or PEFT: a folder or a hub id. [default: none]",
    ),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add MODEL_OPTIONS to a command; `model_settings` reads their values."""
    for option in reversed(MODEL_OPTIONS):
        command = click.option(
            option.flag, option.name, type=option.kind, metavar=option.metavar, help=option.meaning
        )(command)
    return command


def model_settings(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a gateway flag for each of MODEL_OPTIONS that was given to a command."""
    for option in MODEL_OPTIONS:
        if (value := given[option.name]) is not None:
            yield f"--model-setting={option.key}={json.dumps(value)}"


def gateway_flags(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of the gateway's own options that were given to a command."""
    for row in fields(GatewaySettings):
        value = given.get(row.name)
        if value is True:
            yield flag_of(row)
        elif isinstance(value, tuple):
            yield from (f"{flag_of(row)}={each}" for each in value)
        elif isinstance(value, str):
            yield f"{flag_of(row)}={value}"
    if given["api_key_file"]:
        yield f"--api-key-file={given['api_key_file']}"


class Grouped(click.Command):
    """A command whose help lists MODEL_OPTIONS under a separate heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        ours = {option.name for option in MODEL_OPTIONS}
        groups: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups[parameter.name in ours].append(record)
        for heading, records in (("The model", groups[True]), ("Options", groups[False])):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
