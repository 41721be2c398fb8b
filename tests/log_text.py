"""Lines of this project's logs, without what changes from run to run."""

from __future__ import annotations

import re

_TIME = re.compile(r"^time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", re.MULTILINE)


def untimed(text: str) -> str:
    """A text without the time at the beginning of each line."""
    return _TIME.sub("", text)
