"""One model as its YAML file describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field


class Parameters(BaseModel):
    """`parameters:` the model reference, and what a request gets where it does not say."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None


class ModelConfig(BaseModel):
    """A model of the models folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    aliases: list[str] = Field(default_factory=list)
    description: str = ""
    parameters: Parameters
    context_size: int = 0
    options: list[str] = Field(default_factory=list)
    stopwords: list[str] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


def read_folder(folder: Path) -> list[ModelConfig]:
    """Every model of a folder, by file name."""
    files = sorted(folder.glob("*.yaml"))
    return [ModelConfig.model_validate(yaml.safe_load(file.read_text())) for file in files]
