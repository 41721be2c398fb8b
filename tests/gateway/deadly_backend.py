"""`python -m backend` that exits while it tokenises a prompt with the word "deadly"."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from backend import __main__ as entry
from backend.engine.prompting.prompts import PromptBuilder


def main() -> int:
    """Run the backend."""
    build, tokenize = PromptBuilder.build, PromptBuilder.tokenize

    def checked(text: object) -> None:
        if "deadly" in str(text):
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly_build(self: PromptBuilder, prompt: Any, *rest: Any, **named: Any) -> Any:
        checked(prompt)
        return build(self, prompt, *rest, **named)

    def deadly_tokenize(self: PromptBuilder, text: str) -> list[int]:
        checked(text)
        return tokenize(self, text)

    PromptBuilder.build = deadly_build  # type: ignore[method-assign]
    PromptBuilder.tokenize = deadly_tokenize  # type: ignore[method-assign]
    return entry.main(sys.argv[1:], os.environ)


if __name__ == "__main__":
    os._exit(main())
