"""Lists the coding agents that `mlx-backend launch` starts, and how each is configured for a model.

An agent that assumes a larger context window than the model has shortens its conversation too
late. So the context window is set in every agent that has a setting for it. docs/agents.md has a
table of this list (`tests/cli/test_agents.py`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.cache_folder import cache_folder

FOLDER = "{folder}"  # in a Setup: stands for the folder of its files
_MOST_OUTPUT = 16_384  # tokens
# Qwen Code uses nearly all of a context window of up to 33,000 tokens, but leaves 23,000 tokens of
# a larger window unused: of 40,960 it uses only 17,960, hardly more than its own prompt. Only from
# 54,000 tokens on does it use more than of a window of 33,000.
_QWEN_WHOLE, _QWEN_LARGE = 33_000, 54_000


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway and the model that an agent uses there.

    context: maximum number of tokens of prompt and answer together; 0 if it is unknown.
    catalogue: the gateway's description of its models for Codex.
    """

    url: str
    model: str
    context: int = 0
    key: str = "none"
    catalogue: tuple[Mapping[str, Any], ...] = ()

    @property
    def output(self) -> int:
        """Number of tokens of the context that are reserved for an answer."""
        return min(self.context // 10, _MOST_OUTPUT)


@dataclass(frozen=True, slots=True)
class Setup:
    """The instructions for starting an agent with a model.

    environ: environment variables.
    arguments: arguments of the agent's program.
    files: contents of files that the agent reads, by their path.
    before: arguments of an earlier call of the program, which stores settings in the agent's files.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent.

    program: the name of its executable.
    install: the command that installs it.
    tested: the version that was tried.
    setup: returns the set-up for a gateway and its model.
    least: size of the context, in tokens, that it needs: its first request alone has thousands of
        tokens, mostly tools.
    note: what the documentation adds.
    """

    name: str
    program: str
    install: str
    tested: str
    setup: Callable[[Served], Setup]
    least: int = 0
    note: str = ""


def _claude(served: Served) -> Setup:
    environ = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_MODEL": served.model,
        "ANTHROPIC_SMALL_FAST_MODEL": served.model,
    }
    if served.context:
        environ |= {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
            # Without it Claude Code compacts too late; less than 100,000 makes it complain, and
            # the smaller of both windows counts.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(max(served.context, 100_000)),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        }
    return Setup(environ)


def _codex(served: Served) -> Setup:
    provider = {"name": "mlx-backend", "base_url": f"{served.url}/v1"}
    environ = {}
    if served.key != "none":
        provider["env_key"] = "MLX_BACKEND_API_KEY"
        environ["MLX_BACKEND_API_KEY"] = served.key
    settings: dict[str, Any] = {
        "model": served.model,
        "model_provider": "mlx-backend",
        "model_providers.mlx-backend": provider,
    }
    if served.context:
        settings["model_context_window"] = served.context
        # Codex compacts before a message, whatever its length, so the message must fit as well.
        settings["model_auto_compact_token_limit"] = served.context * 3 // 4
    files = {}
    if served.catalogue:
        files["codex-models.json"] = _json({"models": served.catalogue})
        settings["model_catalog_json"] = f"{FOLDER}/codex-models.json"
    flags = (flag for name, value in settings.items() for flag in ("-c", f"{name}={_toml(value)}"))
    return Setup(environ, tuple(flags), files)


def _opencode(served: Served) -> Setup:
    # opencode compacts before a message, whatever its length: `input` reserves tokens for it.
    limit = {"context": served.context, "input": served.context * 7 // 8, "output": served.output}
    config = {
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
                "models": {served.model: {"limit": limit} if served.context else {}},
            }
        },
        "model": f"local/{served.model}",
        "small_model": f"local/{served.model}",
    }
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(served: Served) -> Setup:
    window = served.context
    if _QWEN_WHOLE < window < _QWEN_LARGE:
        window = _QWEN_WHOLE
    generation = {"contextWindowSize": window} if window else {}
    settings = {
        "model": {"name": served.model, "generationConfig": generation},
        "security": {"auth": {"selectedType": "openai"}},
    }
    environ = {
        "OPENAI_BASE_URL": f"{served.url}/v1",
        "OPENAI_API_KEY": served.key,
        "OPENAI_MODEL": served.model,
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{FOLDER}/qwen-settings.json",
    }
    if served.output:
        environ["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(served.output)
    return Setup(environ, files={"qwen-settings.json": _json(settings)})


def _cline(served: Served) -> Setup:
    login = ("auth", "-p", "openai", "-k", served.key, "-m", served.model, "-b", f"{served.url}/v1")
    return Setup(before=login)


def _goose(served: Served) -> Setup:
    environ = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": served.model,
        "OPENAI_HOST": served.url,
        "OPENAI_API_KEY": served.key,
    }
    if served.context:
        environ["GOOSE_CONTEXT_LIMIT"] = str(served.context)
    return Setup(environ)


def _pi(served: Served) -> Setup:
    model: dict[str, Any] = {
        "id": served.model,
        "name": served.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    if served.context:
        model |= {"contextWindow": served.context, "maxTokens": served.output}
    provider = {
        "baseUrl": f"{served.url}/v1",
        "apiKey": served.key,
        "api": "openai-completions",
        "models": [model],
    }
    code = f"export default (pi) => pi.registerProvider('local', {_json(provider).strip()});\n"
    arguments = ("-e", f"{FOLDER}/pi-provider.js", "--provider", "local", "--model", served.model)
    return Setup(arguments=arguments, files={"pi-provider.js": code})


AGENTS = {
    "claude": Agent(
        *("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", "2.1.332"),
        _claude,
        least=40_000,
    ),
    "codex": Agent(
        *("Codex CLI", "codex", "npm install -g @openai/codex", "0.171.0"),
        _codex,
        least=16_000,
        note="Each `-c` may also be a line of `~/.codex/config.toml`. `launch` adds a file that"
        " describes\nthe model (`models` in the answer of `/v1/models`), without which Codex warns"
        " that it has\nno metadata. Codex accepts no description without instructions: those of the"
        " file replace\nCodex's own and are shorter. To keep Codex's own, leave out"
        " `model_catalog_json`.",
    ),
    "opencode": Agent(
        *("opencode", "opencode", "npm install -g opencode-ai", "1.18.34"), _opencode, least=20_000
    ),
    "qwen": Agent(
        *("Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", "0.24.4"),
        _qwen,
        least=24_000,
        note="Qwen Code leaves 23,000 tokens of a large window unused, but uses nearly all of a"
        " window of\nat most 33,000 tokens. So `launch` sets 33,000 for a context of up to 54,000."
        " In that window\nit refuses a message of 9,000 words by its own estimate, even after it"
        " has compressed the\nconversation.",
    ),
    "cline": Agent(
        *("Cline CLI", "cline", "npm install -g cline", "3.0.65"),
        _cline,
        least=20_000,
        note="Cline has no setting for the context window. It reads the error of a full context.",
    ),
    "goose": Agent(
        *(
            "goose",
            "goose",
            "see https://goose-docs.ai",
            "only its providers, in goose-sdk 0.1.0a13",
        ),
        _goose,
    ),
    "pi": Agent(
        *("pi", "pi", "npm install -g @earendil-works/pi-coding-agent", "1.6.0"),
        _pi,
        least=40_000,
        note="pi shortens a conversation when fewer than 16,384 tokens of the window are left, and"
        " leaves\nthe newest 20,000 tokens as they are, so it cannot shorten one in a smaller"
        " window.",
    ),
}


def folder() -> Path:
    """Return the folder for the files of agents."""
    return (cache_folder() or Path("/tmp")) / "agents"


def placed(setup: Setup, where: Path) -> Setup:
    """Return the set-up with its files in a folder."""

    def filled(text: str) -> str:
        return text.replace(FOLDER, str(where))

    return Setup(
        {name: filled(value) for name, value in setup.environ.items()},
        tuple(map(filled, setup.arguments)),
        {str(where / name): filled(content) for name, content in setup.files.items()},
        setup.before,
    )


def script(agent: Agent, setup: Setup, arguments: tuple[str, ...] = ()) -> str:
    """Return the set-up as commands for a shell."""
    lines = []
    for path, content in setup.files.items():
        lines += [f"mkdir -p {_quoted(str(Path(path).parent))}"]
        lines += [f"cat > {_quoted(path)} <<'END'", content.rstrip("\n"), "END"]
    lines += [f"export {name}={_quoted(value)}" for name, value in setup.environ.items()]
    if setup.before:
        lines.append(" ".join(map(_quoted, (agent.program, *setup.before))))
    lines.append(" ".join(map(_quoted, (agent.program, *setup.arguments, *arguments))))
    return "\n".join(lines)


def _quoted(word: str) -> str:
    if re.fullmatch(r"~/[\w./-]+", word):  # the shell expands only an unquoted ~
        return word
    return shlex.quote(word)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _toml(value: str | int | Mapping[str, str]) -> str:
    """Return a value as TOML, which writes strings and numbers as JSON does."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {json.dumps(text)}" for name, text in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
