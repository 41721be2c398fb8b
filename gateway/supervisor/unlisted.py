"""Models that are in no file: hub ids and folders of the models folder, where the owner allows it.

A request's name reaches the file system only as a folder's name below the models folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from gateway.models.config import ModelConfig
from gateway.models.parameters import Parameters
from gateway.models.reading import PLAIN_NAME

_NAME = re.compile(rf"{PLAIN_NAME.pattern}(/{PLAIN_NAME.pattern})?", re.ASCII)


def unlisted(name: str, models_dir: Path) -> ModelConfig | None:
    """A model of this name with all defaults; None for what is no hub id and no folder."""
    if not _NAME.fullmatch(name) or ".." in name:
        return None
    if "/" not in name and not (models_dir / name / "config.json").is_file():
        return None
    return ModelConfig(name=name, parameters=Parameters(model=name))
