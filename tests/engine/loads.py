"""Loads without an engine: all stages on the test's own thread."""

from __future__ import annotations

from backend.engine.loading.stages import at_once as at_once
