"""`launch`: what each agent gets, with programs that print it in place of the real ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.agents import AGENTS, Served, placed, script
from tests.cli.test_command_line import KEY, TINY, Ended, mlx_backend
from tests.gateway.gateway_process import GatewayProcess, tiny
from tests.polling import until

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- launch -->\n", "<!-- end of launch -->\n"
SERVED = Served("http://127.0.0.1:8080", "it's a model", 40_960)
# What the stand-in prints: its arguments, and its environment.
PROGRAM = """\
#!/bin/sh
for word; do printf '%s\\0' "$word"; done > "$RECORD/$(basename "$0").$#"
env -0 > "$RECORD/$(basename "$0").env"
[ "$1" = auth ] || exit 7
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    process = GatewayProcess({"one": tiny(aliases=["uno"])}, "--api-key", KEY)
    process.client.headers["Authorization"] = f"Bearer {KEY}"
    yield process
    process.close()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a stand-in for every agent."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        (folder / agent.program).write_text(PROGRAM)
        (folder / agent.program).chmod(0o755)
    return folder


def launched(gateway: GatewayProcess, programs: Path, *arguments: str) -> Ended:
    return mlx_backend(
        "launch",
        *arguments,
        PATH=f"{programs}:{os.environ['PATH']}",
        RECORD=str(programs),
        MLX_BACKEND_URL=gateway.url,
        MLX_BACKEND_API_KEY=KEY,
        MLX_BACKEND_CACHE=str(programs.parent / "cache"),
        MLX_GATEWAY_API_KEYS="a-secret-of-another-gateway",
        LD_PRELOAD="",  # of the tests themselves
        LD_LIBRARY_PATH="",
    )


def sections() -> str:
    """The table of agents and their sections in docs/agents.md."""
    served = Served("http://127.0.0.1:8080", "NAME", 40_960)
    parts = ["| agent | starts with | smallest context | version that was run |\n|---|---|---|---|"]
    for word, agent in AGENTS.items():
        anchor = agent.name.lower().replace(" ", "-")
        least = f"{agent.least:,}" if agent.least else ""
        parts[0] += f"\n| [{agent.name}](#{anchor}) | `launch {word}` | {least} | {agent.tested} |"
        setup = placed(agent.setup(served), Path("~/.cache/mlx-backend/agents"))
        shown = "\n".join(f"    {line}".rstrip() for line in script(agent, setup).splitlines())
        note = f"\n{agent.note}\n" if agent.note else ""
        parts.append(f"### {agent.name}\n{note}\n{shown}")
    return "\n\n".join(parts) + "\n"


def document(text: str) -> str:
    """docs/agents.md with new sections."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + sections() + "\n" + END + rest.partition(END)[2]


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert document(text) == text


def test_every_agent_is_named_in_the_help() -> None:
    shown = " ".join(mlx_backend("launch", "--help").out.split())
    assert all(word in shown for word in AGENTS)


@pytest.mark.parametrize("word", AGENTS)
def test_an_agent_gets_the_model_the_address_and_the_window(
    word: str, gateway: GatewayProcess, programs: Path
) -> None:
    ended = launched(gateway, programs, word, "--", "exec", "--json", "two words")
    assert ended.code == 7, ended.err
    agent = AGENTS[word]
    files = programs.glob(f"{agent.program}.*")
    calls = {path.suffix: path.read_text() for path in files}
    environment = calls.pop(".env")
    last = max((call.split("\0")[:-1] for call in calls.values()), key=lambda call: "exec" in call)
    assert last[-3:] == ["exec", "--json", "two words"]
    cache = programs.parent / "cache" / "agents"
    paths = list(cache.glob("*"))
    assert {path.stat().st_mode & 0o777 for path in paths} <= {0o600}  # one contains the key
    written = [path.read_text() for path in paths]
    told = "\n".join([environment, *calls.values(), *written])
    assert gateway.url in told
    assert KEY in told
    assert re.search(r"\bone\b", told)
    assert "1024" in told or agent.note.startswith("Cline has no setting")
    assert "a-secret-of-another-gateway" not in environment
    assert "LD_PRELOAD" not in environment
    assert str(ROOT) not in environment.partition("PYTHONPATH=")[2].partition("\0")[0]


@pytest.mark.parametrize("word", AGENTS)
def test_what_is_printed_is_a_script_that_does_the_same(word: str, programs: Path) -> None:
    agent = AGENTS[word]
    setup = placed(agent.setup(SERVED), programs / "a folder")
    text = script(agent, setup, ("it's",))
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(programs)}
    assert subprocess.run(["bash", "-c", text], env=environ, check=False).returncode == 7
    *_, command = text.splitlines()
    assert shlex.split(command) == [agent.program, *setup.arguments, "it's"]
    environment = (programs / f"{agent.program}.env").read_text().split("\0")
    assert set(environment) >= {f"{name}={value}" for name, value in setup.environ.items()}
    for path, content in setup.files.items():
        assert Path(path).read_text() == content


def test_printing_starts_nothing_and_needs_no_agent(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    ended = launched(gateway, tmp_path, "claude", "--print", "--model", "uno")
    assert ended.code == 0, ended.err
    assert f"export ANTHROPIC_BASE_URL={gateway.url}" in ended.out
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=1024" in ended.out
    assert not list(tmp_path.rglob("*"))
    absent = mlx_backend(
        *("launch", "claude", "--url", gateway.url, "--api-key", KEY), PATH="/usr/bin:/bin"
    )
    assert absent.code == 1
    assert "claude is not installed: npm install" in absent.err


def test_a_small_context_is_a_warning(gateway: GatewayProcess, programs: Path) -> None:
    ended = launched(gateway, programs, "claude")
    assert "warning: Claude Code needs a context of about 40,000 tokens" in ended.err


@pytest.mark.parametrize(
    ("context", "told"), [(33_000, 33_000), (40_960, 33_000), (53_999, 33_000), (54_000, 54_000)]
)
def test_qwen_code_is_told_the_window_of_which_it_uses_most(context: int, told: int) -> None:
    (settings,) = AGENTS["qwen"].setup(Served("http://gateway", "one", context)).files.values()
    window = json.loads(settings)["model"]["generationConfig"]["contextWindowSize"]
    assert window == told


def test_codex_reads_its_settings_as_toml() -> None:
    entry = {"slug": "it's a model"}
    setup = AGENTS["codex"].setup(Served("http://h", "it's a model", 100, "k" * 9, (entry,)))
    flags = setup.arguments[1::2]
    assert set(setup.arguments[::2]) == {"-c"}
    settings: dict[str, Any] = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        settings[name] = tomllib.loads(f"value = {value}")["value"]
    assert settings["model"] == "it's a model"
    assert settings["model_context_window"] == 100
    provider = settings["model_providers.mlx-backend"]
    assert provider["base_url"] == "http://h/v1"
    assert setup.environ[provider["env_key"]] == "k" * 9
    (content,) = setup.files.values()
    assert json.loads(content) == {"models": [entry]}


def test_without_a_gateway_the_model_is_served_for_as_long_as_the_agent_runs(
    programs: Path,
) -> None:
    there = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(programs)}
    nowhere = ("--url", "http://127.0.0.1:1")
    ended = mlx_backend(
        *("launch", "codex", *nowhere, "--model", str(TINY), "--context-size", "600"),
        **there,
    )
    assert ended.code == 7, ended.err
    (call,) = programs.glob("codex.[0-9]*")
    words = call.read_text().split("\0")
    assert "model_context_window=600" in words
    assert 'model="tiny_text"' in words
    refused = mlx_backend("launch", "codex", *nowhere, **there)
    assert refused.code == 1
    assert "no gateway answers at http://127.0.0.1:1" in refused.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_gateway_of_an_agent_ends_with_the_command(
    number: signal.Signals, programs: Path
) -> None:
    pid = programs / "pid"
    stand_in = f'#!/bin/sh\necho $$ > "{pid}.new"; mv "{pid}.new" "{pid}"\nexec sleep 600\n'
    (programs / "codex").write_text(stand_in)
    process = subprocess.Popen(
        [
            *(ROOT / "scripts/python", "-m", "cli", "launch", "codex"),
            *("--url", "http://127.0.0.1:1", "--model", str(TINY)),
        ],
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
    )
    until(lambda: pid.exists() or process.poll() is not None)
    started = psutil.Process(process.pid).children(recursive=True)
    agent = psutil.Process(int(pid.read_text()))
    assert len(started) >= 3  # the agent, the gateway and its backend
    process.send_signal(number)
    assert process.wait(240) == 128 + number
    agent.kill()
    _, left = psutil.wait_procs(started, 240)
    assert not left


def test_options_of_a_model_need_a_gateway_of_their_own(gateway: GatewayProcess) -> None:
    ended = mlx_backend(
        *("launch", "claude", "--url", gateway.url, "--api-key", KEY, "--context-size", "9")
    )
    assert ended.code == 2
    assert "--context-size has no effect" in ended.err


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text("utf-8")), "utf-8")
