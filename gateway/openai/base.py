"""What all schemas of requests have in common: nothing is coerced, and nothing unknown passes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MODEL = "A model of the models folder, or its alias; may be left out where there is one."


class Strict(BaseModel):
    """A part of a request: JSON types as they are, finite numbers, and no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )
