"""What a model's own prediction head gains, by the arithmetic of bytes and operations.

A step with guesses reads the weights once for all its tokens, as a prefill pass does. A row with a
recurrent state that guessed wrong is fed its right tokens again in its next step. Each guess is a
pass of the head over all rows. The published shares of right guesses are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.report import Table
from bench.simulation.setup import Draft, drafts

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 2048  # tokens before each row's next one


def tokens(draft: Draft, width: int) -> float:
    """Expected of a row in a step with so many guesses."""
    return 1 + sum(draft.held[:width])


def fed_again(draft: Draft, width: int) -> float:
    """Tokens that a row is expected to be fed once more in a step."""
    if not (width and draft.model.state):
        return 0.0
    chances = (1.0, *draft.held[:width])  # that the first so many guesses are right
    return sum((chances[at] - chances[at + 1]) * (1 + at) for at in range(width))


def step_seconds(draft: Draft, rows: int, width: int) -> float:
    """Seconds of a step that checks so many guesses of each row."""
    plain = draft.setup.decode_seconds(rows, CONTEXT)
    if not width:
        return plain
    each = 1 + width + fed_again(draft, width)
    read = draft.setup.pass_seconds(rows, each, CONTEXT)
    head = draft.head * draft.model.bits / 8
    reached = draft.machine.bandwidth * draft.machine.bandwidth_share
    return read + (each - 1) * draft.further * plain + width * head / reached


def gain(draft: Draft, rows: int, width: int) -> float:
    """Tokens per second over those of plain steps."""
    plain = step_seconds(draft, rows, 0)
    return tokens(draft, width) * plain / step_seconds(draft, rows, width)


def tables() -> Iterator[Table]:
    """A table for each model on its machine: widths against numbers of rows."""
    for draft in drafts():
        widths = range(len(draft.held) + 1)
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
