"""Declares the fields of schemas: the description first, and a default."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def about(description: str, default: Any = None, **limits: Any) -> Any:
    """Return a field that may be missing; it may be null only if its type allows that."""
    return Field(default, description=description, **limits)
