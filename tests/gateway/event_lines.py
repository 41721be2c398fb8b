"""Server-sent events as clients read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

Json = dict[str, Any]


def events_of(lines: Iterable[str]) -> Iterator[Json]:
    """The data of every event; its `event:` line must say what `type` says."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data: Json = json.loads(line.removeprefix("data: "))
            assert data["type"] == name
            yield data
        else:
            assert line == "" or line.startswith(":"), line
