"""Describes models for Codex, which assumes a window of 258,400 tokens without a description.

Codex reads it from GET /models or from a file, and then uses these instructions instead of its own.
They are short, because a local model reads them before each conversation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_EFFORTS = {
    "low": "Thinks briefly",
    "medium": "Thinks as long as the task needs",
    "high": "Thinks for as long as it can",
}
_INSTRUCTIONS = """\
You are a coding agent that works in the user's terminal, in a folder of the user's files.

Work until the user's task is done, and do not ask for what you can find out with a tool. Look at \
the files before you change them, and search with `rg` if it is installed. Change only what the \
task needs, keep the style of the code around it, and never undo changes that you did not make. \
Run the project's tests or the program itself to check your work. Never delete files, rewrite git \
history or send data to other machines unless the user asked for it.

To edit files, use the tool `apply_patch`. Its input is a patch of this form, with paths relative \
to the working folder:

*** Begin Patch
*** Update File: path/to/file.py
@@ def greet():
-    print("Hi")
+    print("Hello")
*** Add File: path/to/new.txt
+A line of the new file
*** Delete File: path/to/old.txt
*** End Patch

Removed lines begin with `-`, added ones with `+`, and unchanged ones around them with a space.

Before a group of tool calls, say in one sentence what you do. When the task is done, say briefly \
what you changed, with the paths, and what you could not check."""


def entry(name: str, context: int | None, abilities: Collection[str]) -> dict[str, Any]:
    """Return a model in Codex's form.

    context: tokens of prompt and answer; None if unknown.
    """
    thinks = "thinking" in abilities
    # Codex compacts before a message, whatever its length, so the message must fit as well.
    windows = {"auto_compact_token_limit": context * 3 // 4} if context else {}
    windows |= dict.fromkeys(("context_window", "max_context_window"), context) if context else {}
    efforts = [{"effort": effort, "description": text} for effort, text in _EFFORTS.items()]
    return {
        **dict.fromkeys(("slug", "display_name"), name),
        "description": "A local model",
        "default_reasoning_level": "medium" if thinks else None,
        "supported_reasoning_levels": efforts if thinks else [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": thinks,
        "support_verbosity": False,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        **windows,
        "experimental_supported_tools": [],
        "input_modalities": ["text", *(["image"] if "vision" in abilities else [])],
        **dict.fromkeys(("upgrade", "availability_nux", "default_verbosity", "model_messages")),
    }
