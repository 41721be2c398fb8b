"""`python -m backend` that a signal ends while it tokenises a prompt with the word "deadly".

DEADLY_LOAD: the number of a signal that ends it while it loads a model.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from backend import __main__ as entry
from backend.engine import device
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

    def deadly_tokenize(self: PromptBuilder, text: str, *, special: bool = False) -> list[int]:
        checked(text)
        return tokenize(self, text, special=special)

    def deadly_detect(root: Path = Path("/")) -> NoReturn:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal ends the process")

    PromptBuilder.build = deadly_build  # type: ignore[method-assign]
    PromptBuilder.tokenize = deadly_tokenize  # type: ignore[method-assign]
    if number := int(os.environ.get("DEADLY_LOAD", 0)):
        device.detect = deadly_detect
    return entry.main(sys.argv[1:], os.environ)


if __name__ == "__main__":
    os._exit(main())
