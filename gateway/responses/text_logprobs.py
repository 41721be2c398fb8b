"""Which of a backend's log-probabilities are those of the text, where text begins.

Tokens that write no text of their own (the end of reasoning, the mark of a channel) are sent with
the Reply that comes next, and where reasoning ends and text begins in one step the first Reply has
the tokens of both. What a token writes says which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def of_text(text: str, before: Sequence[Json], beside: Sequence[Json]) -> Sequence[Json]:
    """The entries from the one on that begins `text`, of those sent right `before` and `beside` it.

    Entries may go further than the text, whose end may be held back. Where none begins it, because
    a token writes text and more, they are all those beside it.
    """
    entries = [*before, *beside]
    wanted = text.encode()
    written = [_written(entry) for entry in entries]
    tails = [b"".join(written[at:]) for at in range(len(entries))]
    exact = [at for at, tail in enumerate(tails) if tail == wanted]
    longer = [at for at, tail in enumerate(tails) if tail.startswith(wanted)]
    found = exact or longer
    return entries[found[0] :] if found else beside


def _written(entry: Json) -> bytes:
    """What the token writes; backends other than ours may leave its bytes out."""
    raw = entry.get("bytes")
    return str(entry["token"]).encode() if raw is None else bytes(raw)
