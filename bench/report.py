"""Formats results, one line per figure: name, value, goal, and whether the goal is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured ratio or latency.

    goal: the bound in words.
    met: None if there is no goal.
    """

    name: str
    value: str
    goal: str = ""
    met: bool | None = None

    def __str__(self) -> str:
        mark = {True: "met", False: "MISSED", None: ""}[self.met]
        goal = f"goal {self.goal}" if self.goal else ""
        return f"{self.name:<58} {self.value:>28}  {goal:<18} {mark}".rstrip()


@dataclass(frozen=True, slots=True)
class Table:
    """Figures side by side, without goals: a title, the names of the columns, and the rows.

    Its text is Markdown.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    met: bool | None = None

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        rule = ["-" * width for width in widths]
        lines = [
            f"| {' | '.join(map(str.rjust, row, widths))} |"
            for row in (self.header, rule, *self.rows)
        ]
        return "\n".join(["", self.title, *lines])


def at_most(name: str, value: float, bound: float, detail: str = "") -> Figure:
    return Figure(name, _formatted(value, detail), f"<= {bound:.3g}", value <= bound)


def at_least(name: str, value: float, bound: float, detail: str = "") -> Figure:
    return Figure(name, _formatted(value, detail), f">= {bound:.3g}", value >= bound)


def fact(name: str, value: float, detail: str = "") -> Figure:
    return Figure(name, _formatted(value, detail))


def _formatted(value: float, detail: str) -> str:
    return f"{value:.3g} ({detail})" if detail else f"{value:.3g}"
