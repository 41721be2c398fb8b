"""What a request and a model's settings ask of the prompt cache on disk. Pure, needs no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.engine.errors import InvalidRequest
from common.wording import shown


@dataclass(frozen=True, slots=True)
class DiskUse:
    """How one request uses the disk.

    path: the file of PromptCachePath; None means the folder of the model's settings, if any.
    answer: PromptCacheAll, the answer's KV is kept too. read_only: PromptCacheRO.
    """

    path: Path | None = None
    answer: bool = False
    read_only: bool = False

    def saves_prompt(self, *, trimmable: bool) -> bool:
        """Whether to save where the prompt ends.

        What can be cut back is saved once, with the answer. What cannot serves the next turn only
        where the template repeats the answer as it was, so its prompt is kept for itself; a file
        of its own holds one entry, and then the answer's is the later one.
        """
        return not self.read_only and (not self.answer or not (trimmable or self.path))

    @property
    def saves_answer(self) -> bool:
        """Whether to save when the answer has ended."""
        return self.answer and not self.read_only


UNSET = DiskUse()  # of a request whose three fields are all unset


def disk_use(path: str, *, answer: bool, read_only: bool) -> DiskUse:
    """The three fields of PredictOptions. Raises InvalidRequest for a path that names no file."""
    return DiskUse(_absolute("PromptCachePath", path), answer, read_only)


def cache_folder(setting: str) -> Path | None:
    """The folder of the `prompt_cache_dir` setting; None when it is off. Raises InvalidRequest."""
    return _absolute("prompt_cache_dir", setting)


def _absolute(name: str, text: str) -> Path | None:
    """A relative path would depend on the folder that the host happens to start us in."""
    if not text.strip():
        return None
    path = Path(text)
    if "\0" in text or not path.is_absolute() or not path.name:
        raise InvalidRequest(f"{name} must be an absolute path, but it is {shown(text)}", name)
    return path
