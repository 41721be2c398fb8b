"""What a model's own prediction head gains, by the arithmetic of bytes and operations.

A step with guesses reads the weights once for all its tokens, as a prefill pass does. After a wrong
guess, a row with a recurrent state is fed its right tokens again in the next step. Each guess is a
pass of the head over all rows. Published shares of right guesses are used unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.report import Table
from bench.simulation.setup import Draft, drafts

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 2048  # tokens before each row's next one


def tokens(draft: Draft, width: int) -> float:
    """Expected number of tokens of a row in a step with `width` guesses."""
    return 1 + sum(draft.right[:width])


def fed_again(draft: Draft, width: int) -> float:
    """Expected number of tokens that a step feeds to a row for the second time."""
    if not (width and draft.model.state):
        return 0.0
    # probabilities that the first 0, 1, 2 … guesses are right
    chances = (1.0, *draft.right[:width])
    return sum((chances[at] - chances[at + 1]) * (1 + at) for at in range(width))


def step_seconds(draft: Draft, rows: int, width: int) -> float:
    """Seconds of a step that checks `width` guesses for each row."""
    plain = draft.setup.decode_seconds(rows, CONTEXT)
    if not width:
        return plain
    each = 1 + width + fed_again(draft, width)
    read = draft.setup.pass_seconds(rows, each, CONTEXT)
    head = draft.head * draft.model.bits / 8
    reached = draft.machine.bandwidth * draft.machine.bandwidth_share
    return read + (each - 1) * draft.further * plain + width * head / reached


def gain(draft: Draft, rows: int, width: int) -> float:
    """Tokens per second relative to those of plain steps."""
    plain = step_seconds(draft, rows, 0)
    return tokens(draft, width) * plain / step_seconds(draft, rows, width)


def tables() -> Iterator[Table]:
    """A table for each model on its machine: widths against numbers of rows."""
    for draft in drafts():
        widths = range(len(draft.right) + 1)
        best = [max(widths, key=lambda width: gain(draft, rows, width)) for rows in ROWS]
        lines = [
            [f"{width} guesses", *(f"{gain(draft, rows, width):.2f}" for rows in ROWS)]
            for width in widths
            if width
        ]
        lines.append(["the best width", *map(str, best)])
        title = (
            f"{draft.setup.name}: tokens per second with its own prediction head / without,"
            f" {CONTEXT} tokens of context"
        )
        yield Table(title, ["", *(f"{rows} rows" for rows in ROWS)], lines)
