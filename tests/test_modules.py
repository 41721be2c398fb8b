"""Every module of the product has a test file that covers it, and this is where to find it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
PARTS = ("backend", "cli", "common", "gateway")

# Modules, and packages, that a test file covers without importing them: it runs a process, or calls
# another module. A file also covers what it imports, and test_NAME.py covers a module NAME.
COVERED = {
    "acceptance/test_chat.py": "backend/rpc/replies",
    "acceptance/test_embedding.py": "backend/rpc/text_readings",
    "acceptance/test_hanging.py": "backend/rpc/watchdog",
    "acceptance/test_transcription.py": "backend/engine/speech/speech_builder",
    "cli/test_agents.py": "cli/launching",
    "cli/test_command_line.py": """
        cli/__main__ cli/client cli/conversation cli/local_models cli/options
        cli/progress common/progress_bar
    """,
    "cli/test_default_model.py": "common/cache_folder",
    "cli/test_serve.py": "gateway/greeting",
    "common/test_abilities.py": "common/template_files",
    "common/test_chat_corpus.py": "common/formats",
    "common/test_gbnf_language.py": "common/gbnf",
    "common/test_pdf_text.py": "common/pdf_process",
    "engine/constraints/test_calls.py": "common/call_grammar",
    "engine/constraints/test_grammars.py": "backend/engine/recent",
    "engine/constraints/test_trial.py": """
        backend/engine/constraints/reading backend/engine/constraints/trial_process
    """,
    "engine/drafting/test_loading.py": "common/drafter_kind",
    "engine/drafting/test_state_drafters.py": "backend/engine/drafting/heads",
    "engine/embedding/test_adapters.py": "backend/engine/embedding/kind",
    "engine/embedding/test_families.py": """
        backend/engine/embedding/embedding_builder backend/engine/embedding/encoder
        backend/engine/embedding/encoder_shape backend/engine/embedding/network_loading
    """,
    "engine/test_engine.py": "backend/engine/prompting/text_calls",
    "engine/executing/test_scoring.py": "backend/engine/executing/kept_entries",
    "engine/media/test_sounds.py": "backend/engine/media/audio_process",
    "engine/media/test_videos.py": "backend/engine/media/child backend/engine/media/video_process",
    "engine/planning/test_planner.py": """
        backend/engine/planning/stored_entries backend/engine/planning/text_turn
    """,
    "engine/planning/test_planner_order.py": "backend/engine/planning/prefill_turns",
    "engine/ranks/test_equality.py": "backend/engine/ranks/leading_executor",
    "engine/sampling/test_logits_head.py": "backend/engine/patching",
    "engine/sampling/test_penalties.py": "backend/engine/sampling/subset",
    "engine/test_loading_adapters.py": "backend/engine/loading/adapter_layers",
    "engine/test_loading_quirks.py": """
        backend/engine/loading/chat_templates backend/engine/loading/folder
    """,
    "engine/test_loading_weights.py": "backend/engine/loading/shards",
    "engine/test_peft_references.py": "backend/engine/loading/untied_head",
    "engine/test_pass_times.py": "backend/engine/executing/step_times",
    "engine/test_serving_trial.py": "backend/engine/loading/row_masks",
    "engine/vision/test_order_of_parts.py": """
        backend/engine/vision/media_prompts backend/engine/vision/media_prefill common/media_parts
    """,
    "gateway/anthropic/test_messages.py": "gateway/routes/messages",
    "gateway/anthropic/test_messages_to_chat.py": "gateway/anthropic/request common/part_text",
    "gateway/models/test_model_config.py": "common/expansion",
    "gateway/ollama/test_ollama.py": "gateway/ollama/answer",
    "gateway/openai/test_chat_answers.py": "gateway/routes/chat",
    "gateway/openai/test_chat_document.py": "gateway/described gateway/openapi",
    "gateway/openai/test_chat_leaving.py": "gateway/leaving",
    "gateway/openai/test_chat_to_wire.py": """
        gateway/openai/answer_format gateway/openai/tools gateway/openai/messages
    """,
    "gateway/openai/test_completions.py": """
        gateway/openai/answer gateway/routes/completions
    """,
    "gateway/responses/test_responses.py": "gateway/routes/responses",
    "gateway/responses/test_responses_to_chat.py": "gateway/responses/items",
    "gateway/routes/test_model_pages.py": "gateway/responses/codex_models gateway/routes/models",
    "gateway/routes/test_shell_numbers.py": "gateway/routes/rerank gateway/routes/tokenize",
    "gateway/supervisor/test_supervisor.py": "gateway/supervisor/backend",
    "gateway/supervisor/test_supervisor_warden.py": "gateway/supervisor/warden_process",
    "gateway/test_errors_bodies.py": "gateway/fields gateway/repairs gateway/tagged",
    "gateway/test_errors_table.py": "gateway/calls",
    "gateway/test_logs.py": "gateway/access gateway/logs",
    "gateway/test_metrics.py": "gateway/metrics",
    "gateway/test_safety_doors.py": "gateway/admission",
    "gateway/test_shell_end.py": "gateway/server",
    "gateway/test_shell_start.py": "gateway/__main__ gateway/routes/health",
    "install/test_run.py": "common/inherited_signals",
    "rpc/test_process.py": "backend/rpc/address backend/rpc/lifetime common/standard_streams",
    "rpc/test_requests.py": """
        backend/rpc/checks backend/rpc/prompt_fields backend/rpc/requests
    """,
}


def _imported(file: Path) -> Iterator[str]:
    """The names that a file imports, with slashes."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield module.replace(".", "/")
                yield from (f"{module}.{name.name}".replace(".", "/") for name in names)
            case ast.Import(names=names):
                yield from (name.name.replace(".", "/") for name in names)


def _modules() -> set[str]:
    files = (file for part in PARTS for file in (ROOT / part).rglob("*.py"))
    return {
        file.relative_to(ROOT).with_suffix("").as_posix()
        for file in files
        if file.name != "__init__.py"
    }


def test_every_module_is_covered_by_a_test_file() -> None:
    files = [file for file in HERE.rglob("test_*.py") if file != Path(__file__)]
    named = {file.stem.removeprefix("test_") for file in files}
    imported = {name for file in files for name in _imported(file)}
    listed = [name for names in COVERED.values() for name in names.split()]
    uncovered = {
        module
        for module in _modules() - imported
        if Path(module).name not in named
        and not any(module == name or module.startswith(f"{name}/") for name in listed)
    }
    assert not uncovered


def test_the_list_names_what_exists_once() -> None:
    listed = [name for names in COVERED.values() for name in names.split()]
    assert len(listed) == len(set(listed))
    assert all((HERE / file).is_file() for file in COVERED)
    assert all((ROOT / f"{name}.py").is_file() or (ROOT / name).is_dir() for name in listed)
