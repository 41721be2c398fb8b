"""Runs `mlx-backend pull`, which downloads a model from the hub with a progress bar."""

from __future__ import annotations

import subprocess
from collections import deque

import click

from cli import default_model, local_models
from cli.progress import Progress
from common import launch
from gateway.supervisor.process import DOWNLOAD


def pull(reference: str) -> str:
    """Download a model, and check that it can be served.

    Returns a message for the user. Raises ClickException, ModelUnavailable, OSError.
    """
    if reference.casefold() == default_model.NAME.casefold():
        return f"{default_model.NAME} is in {default_model.ensure()}"
    downloading = subprocess.Popen(
        launch.command("-m", "backend.engine.loading.download", reference),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert downloading.stdout is not None
    last: deque[str] = deque(maxlen=1)
    with Progress(f"downloading {reference}") as progress:
        for line in downloading.stdout:
            if match := DOWNLOAD.search(line):
                progress.show(int(match[1]), int(match[2]))
            elif line.strip():
                last.append(line.strip())
    if downloading.wait() != 0:
        raise click.ClickException(last[0] if last else "the download ended")
    return f"{local_models.named(reference).name} is in {last[0]}"
