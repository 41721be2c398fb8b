"""Runs `mlx-backend launch`, which starts a coding agent with the settings for a model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import click

from cli.agents import AGENTS, Agent, Served, Setup, folder, placed, script
from cli.client import Client
from common.child_environment import backend_environ
from common.wording import did_you_mean


def agent(word: str) -> Agent:
    """Return the agent of this name. Raises UsageError."""
    found = AGENTS.get(word.lower())
    if found is None:
        suggestion = did_you_mean(word, AGENTS) or f"; the agents are {', '.join(AGENTS)}"
        raise click.UsageError(f"{word!r} is not an agent that can be launched{suggestion}")
    return found


def served(client: Client, name: str) -> Served:
    """Describe a gateway and its model for an agent. Raises Refused."""
    card = client.model(name)
    listed = client.get("/v1/models").get("models", [])
    catalogue = tuple(entry for entry in listed if entry["slug"] == card["id"])
    context = card.get("context_length") or 0
    return Served(client.url, card["id"], context, client.key or "none", catalogue)


def start(
    chosen: Agent, model: Served, arguments: tuple[str, ...], *, only_print: bool, replace: bool
) -> int:
    """Start an agent, or print the commands that do so. Returns the agent's exit code.

    replace: whether the agent replaces this process.
    """
    setup = placed(chosen.setup(model), folder())
    if only_print:
        click.echo(script(chosen, setup, arguments))
        return 0
    program = shutil.which(chosen.program)
    if program is None:
        raise click.ClickException(f"{chosen.program} is not installed: {chosen.install}")
    if 0 < model.context < chosen.least:
        click.echo(
            f"warning: {chosen.name} needs a context of about {chosen.least:,} tokens, and"
            f" {model.model} has {model.context:,}: serve a model with a larger context, or raise"
            " --context-size",
            err=True,
        )
    return _run(program, setup, arguments, replace=replace)


def _run(program: str, setup: Setup, arguments: tuple[str, ...], *, replace: bool) -> int:
    for path, content in setup.files.items():
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)  # the content may include the key
        file.chmod(0o600)
        file.write_text(content, "utf-8")
    environ = backend_environ(os.environ, setup.environ)
    if setup.before:
        code = subprocess.run([program, *setup.before], env=environ, check=False).returncode
        if code:
            return code
    command = [program, *setup.arguments, *arguments]
    if replace:
        os.execve(program, command, environ)
    agent_process = subprocess.Popen(command, env=environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent, which may continue
    code = agent_process.wait()
    return code if code >= 0 else 128 - code
