"""How a request uses the prompt cache on disk. Pure, needs no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.engine.errors import InvalidRequest
from common.field_names import named
from common.wording import shown


@dataclass(frozen=True, slots=True)
class DiskUse:
    """How one request uses the disk.

    path: the folder named by PromptCachePath; None means that of the model's settings, if any.
    answer: store the answer's KV too (PromptCacheAll).
    read_only: store nothing (PromptCacheRO).
    """

    path: Path | None = None
    answer: bool = False
    read_only: bool = False

    def saves_prompt(self, *, trimmable: bool) -> bool:
        """Return whether to save the KV at the end of the prompt.

        KV that can be truncated is saved once, with the answer. KV that cannot is useful for the
        next turn only if the template repeats the answer unchanged, so both are saved.
        """
        return not self.read_only and not (self.answer and trimmable)

    @property
    def saves_answer(self) -> bool:
        """Whether to save the KV at the end of the answer."""
        return self.answer and not self.read_only


UNSET = DiskUse()  # for a request that sets none of the three fields


def disk_use(path: str, *, answer: bool, read_only: bool) -> DiskUse:
    """The use that the fields of PredictOptions ask for. Raises InvalidRequest for a bad path."""
    return DiskUse(_absolute("PromptCachePath", path), answer, read_only)


def cache_folder(setting: str) -> Path | None:
    """The folder of the `prompt_cache_dir` setting; None when it is off. Raises InvalidRequest."""
    return _absolute("prompt_cache_dir", setting)


def _absolute(name: str, text: str) -> Path | None:
    """Paths must be absolute: the working directory depends on how the host starts the process."""
    if not text.strip():
        return None
    path = Path(text)
    if "\0" in text or not path.is_absolute() or not path.name:
        raise InvalidRequest(f"{named(name)} must be an absolute path, but it is {shown(text)}")
    return path
