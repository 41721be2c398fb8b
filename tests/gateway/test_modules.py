"""Every module of the gateway has a test file that covers it, and this is where to find it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Modules that no test imports, because they are tested through a running gateway or another module.
COVERED = {
    "tests/cli/test_serve.py": "greeting",
    "tests/gateway/openai/test_chat_answers.py": "openai/envelope routes/chat",
    "tests/gateway/openai/test_chat_document.py": "described openapi",
    "tests/gateway/openai/test_chat_leaving.py": "leaving",
    "tests/gateway/openai/test_chat_to_wire.py": "openai/format_fields openai/format_to_wire"
    " openai/template_arguments openai/tools openai/tools_to_wire openai/turns",
    "tests/gateway/openai/test_completions.py": "openai/completion_answer routes/completions",
    "tests/gateway/test_errors_bodies.py": "openai/base tagged",
    "tests/gateway/test_errors_table.py": "anthropic/errors calls",
    "tests/gateway/test_logs.py": "access logs",
    "tests/gateway/anthropic/test_messages.py": "routes/messages",
    "tests/gateway/anthropic/test_messages_to_chat.py": "anthropic/blocks",
    "tests/gateway/test_metrics.py": "model_metrics",
    "tests/gateway/routes/test_model_pages.py": "responses/codex_models routes/models",
    "tests/gateway/ollama/test_ollama.py": "ollama/answer",
    "tests/gateway/responses/test_responses.py": "routes/responses",
    "tests/gateway/responses/test_responses_to_chat.py": "responses/tools",
    "tests/gateway/test_safety_doors.py": "auth origins",
    "tests/gateway/test_shell_end.py": "server",
    "tests/gateway/routes/test_shell_numbers.py": "routes/rerank routes/tokenize",
    "tests/gateway/test_shell_start.py": "__main__ routes/health",
    "tests/gateway/supervisor/test_supervisor.py": "supervisor/backend",
    "tests/gateway/supervisor/test_supervisor_warden.py": "supervisor/warden_process",
    "tests/gateway/openai/test_thinking.py": "openai/thinking_fields",
    "tests/gateway/openai/test_unseen_media.py": "openai/unseen_media",
}


def imported() -> set[str]:
    """The gateway's modules that a test imports."""
    found: set[str] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gateway"):
                found.add(str(node.module))
                found |= {f"{node.module}.{name.name}" for name in node.names}
    return {name.removeprefix("gateway.").replace(".", "/") for name in found}


def test_every_module_is_covered_by_a_test_file() -> None:
    modules = {
        str(file.relative_to(ROOT / "gateway").with_suffix(""))
        for file in (ROOT / "gateway").rglob("*.py")
        if file.name != "__init__.py"
    }
    listed = [module for names in COVERED.values() for module in names.split()]
    assert len(listed) == len(set(listed))
    assert all((ROOT / file).exists() for file in COVERED)
    assert set(listed) - imported() == modules - imported()
