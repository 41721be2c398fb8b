"""How a request uses the prompt cache on disk. This module does not use MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.engine.errors import InvalidRequest
from common.field_names import named
from common.wording import shown


@dataclass(frozen=True, slots=True)
class DiskUse:
    """How a request uses the disk."""

    # The folder in PromptCachePath; None means the folder of the model's settings, if any.
    path: Path | None = None
    answer: bool = False  # whether to store the answer's KV too (PromptCacheAll)
    read_only: bool = False  # whether to store nothing (PromptCacheRO)

    def saves_prompt(self, *, trimmable: bool) -> bool:
        """Return whether to save the KV at the end of the prompt.

        If KV can be truncated, it is saved once, with the answer. Otherwise the answer's KV is
        useful for the next turn only if the template repeats the answer unchanged, so the prompt's
        KV is saved too.
        """
        return not self.read_only and not (self.answer and trimmable)

    @property
    def saves_answer(self) -> bool:
        """Whether to save the KV at the end of the answer."""
        return self.answer and not self.read_only


UNSET = DiskUse()  # for a request that sets none of the three fields


def absolute_folder(name: str, text: str) -> Path | None:
    """Return the folder in a setting or field; None if the text is blank. Raises InvalidRequest.

    Relative paths are refused, because the working directory depends on how the host starts the
    process.
    """
    if not text.strip():
        return None
    path = Path(text)
    if "\0" in text or not path.is_absolute() or not path.name:
        raise InvalidRequest(
            f"{named(name)} must be an absolute path of a folder below `/`, but it is {shown(text)}"
        )
    return path
