"""The image and the services use commands and paths that exist, and are valid."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
import shutil
import sys
import tomllib
import urllib.parse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cli.command_line import COMMAND
from gateway.settings import GatewaySettings
from tests.gateway.gateway_process import GatewayProcess
from tests.install.shell import ROOT, clean_environment, shell

SERVICES = ROOT / "scripts" / "services"
HEALTHY = ROOT / "scripts" / "healthy.py"
UNIT = SERVICES / "mlx-backend.service"
PLIST = SERVICES / "mlx-backend.plist"
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(GatewaySettings)}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each as its keyword and the rest."""
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.splitlines() if line]


def only(word: str) -> str:
    (rest,) = [rest for given, rest in instructions() if given == word]
    return rest


def test_the_image_is_built_by_commands_that_exist() -> None:
    command = next(rest for word, rest in instructions() if word == "RUN")
    readable, install, compiling = command.split(" && ")
    assert readable == "chmod -R a+rX ."  # a umask of 077 may have made the checkout private
    program, option = install.split()
    assert option in shell(ROOT / program, "--help").stdout
    arguments = compiling.split()
    assert (ROOT / arguments[0]).exists()
    ours = arguments[arguments.index("venv/lib") + 1 :]
    assert set(ours) == {"backend", "cli", "common", "gateway", "wire"}
    usage = shell(ROOT / "install.sh", "--help").stdout
    for word, rest in instructions():
        if word == "ARG":
            assert rest.partition("=")[0] in usage


def test_the_image_starts_the_command_of_the_wheel() -> None:
    program, *arguments = json.loads(only("ENTRYPOINT"))
    assert (ROOT / Path(program).relative_to("/opt/mlx-backend")).exists()
    assert arguments == ["-m", "cli"]
    (word,) = json.loads(only("CMD"))
    assert word in COMMAND.commands
    assert only("USER") not in ("0", "root")
    for name, _, value in (pair.partition("=") for pair in only("ENV").split()):
        if name.startswith("MLX_GATEWAY_"):
            assert name.removeprefix("MLX_GATEWAY_").lower() in DEFAULTS
        else:
            assert value.startswith(only("VOLUME"))


def test_the_image_is_healthy_if_the_gateway_answers() -> None:
    options, _, check = only("HEALTHCHECK").partition("CMD ")
    assert "--start-period" in options
    _, script, command_line = json.loads(check)
    assert (ROOT / Path(script).relative_to("/opt/mlx-backend")) == HEALTHY
    assert command_line == "/proc/1/cmdline"
    assert only("EXPOSE") == str(DEFAULTS["port"])


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess({})
    yield process
    process.close()


def health(folder: Path, *arguments: str, **environ: str) -> int:
    """The exit code of the image's check in a container that was started with these arguments."""
    command_line = folder / "cmdline"
    command_line.write_text("\0".join(("python", "-m", "cli", "serve", *arguments, "")))
    return shell(
        sys.executable, HEALTHY, command_line, environment=clean_environment(**environ)
    ).returncode


def test_the_check_follows_the_port_and_the_address(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    port = str(urllib.parse.urlsplit(gateway.url).port)
    assert health(tmp_path, "--port", port) == 0
    assert health(tmp_path, f"--port={port}", "--host", "0.0.0.0") == 0
    assert health(tmp_path, "owner/model", "--host=127.0.0.1", MLX_GATEWAY_PORT=port) == 0
    assert health(tmp_path, MLX_GATEWAY_PORT=port, MLX_GATEWAY_HOST="0.0.0.0") == 0
    assert health(tmp_path, "--port", "1", MLX_GATEWAY_PORT=port) == 1
    assert health(tmp_path, "--port", port, "--host", "::") == 1


def test_the_image_s_context_has_what_the_command_needs() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().splitlines())
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert not ignored & set(wheel["targets"]["wheel"]["only-include"])
    assert {"docs", "tests", "venv", "bench", ".*"} <= ignored


def test_the_services_start_the_command_and_let_requests_end() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    agent = plistlib.loads(PLIST.read_bytes())
    for command in (unit["Service"]["ExecStart"].split(), agent["ProgramArguments"]):
        assert Path(command[0]).name == "mlx-backend"
        assert command[1] == "serve"
    for seconds in (int(unit["Service"]["TimeoutStopSec"]), agent["ExitTimeOut"]):
        assert seconds > DEFAULTS["drain_timeout"] + 15  # the time that a backend has after SIGTERM


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_finds_no_errors(tmp_path: Path) -> None:
    program = re.escape("%h/.local/bin/mlx-backend")
    text, changed = re.subn(rf"ExecStart={program}", "ExecStart=/bin/true", UNIT.read_text())
    assert changed == 1
    (tmp_path / UNIT.name).write_text(text)
    environment = clean_environment(XDG_RUNTIME_DIR=str(tmp_path))
    result = shell(
        "systemd-analyze", "verify", "--user", tmp_path / UNIT.name, environment=environment
    )
    assert (result.returncode, result.stderr) == (0, "")
