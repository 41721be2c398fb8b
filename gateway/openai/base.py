"""The base of all request schemas: nothing is coerced, and unknown fields are refused.

Requests as such are more lenient: see `gateway.tolerance`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from common.field_table import FieldTable
from gateway import tolerance
from gateway.described import about
from gateway.openai.other_fields import without_refused

_MODEL = "A model of the models folder, or its alias; may be left out if there is only one."


class Strict(BaseModel):
    """A part of a request: JSON types as they are, finite numbers, and no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )


class Request(Strict):
    """The body of a request, without fields that have no meaning here.

    `others`: fields beyond the schema; one that cannot be honoured and would change the answer
    raises ApiError.
    """

    others: ClassVar[FieldTable] = FieldTable()

    model: str | None = Field(None, min_length=1, description=_MODEL)

    @model_validator(mode="wrap")
    @classmethod
    def _tolerate(cls, body: Any, check: ModelWrapValidatorHandler[Any]) -> Any:
        return tolerance.checked(without_refused(body, cls.others), check)


class StreamOptions(Strict):
    """What a stream contains in addition to the answer."""

    include_usage: bool | None = about("Whether the last chunk has the usage.")


class TextRequest(Request):
    """The fields that chat and completion requests share, apart from sampling."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = about("llama.cpp: a stream reports prompt progress.")
