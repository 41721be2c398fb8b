"""The table of settings in Markdown: `python -m backend.engine.settings_table`."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from backend.engine.setting_rules import Rule
from backend.engine.settings import Settings


def render_table() -> str:
    """The table of settings in Markdown, for docs/options.md."""
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    for entry in fields(Settings):
        rule: Rule = entry.metadata["rule"]
        rows.append(
            f"| `{entry.name}` | {rule.expects} | {_shown_default(entry)} | {rule.meaning} |"
        )
    return "\n".join(rows) + "\n"


def _shown_default(entry: Field[Any]) -> str:
    assert entry.default is not MISSING
    if entry.default is None:
        return "auto"
    if isinstance(entry.default, bool):
        return str(entry.default).lower()
    return str(entry.default)


if __name__ == "__main__":
    print(render_table(), end="")
