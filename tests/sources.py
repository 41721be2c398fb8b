"""Parses Python files without searching for garbage meanwhile, and reads their texts."""

from __future__ import annotations

import ast
import gc
import tokenize
from functools import cache
from pathlib import Path


def tree(path: Path) -> ast.Module:
    """The syntax tree of a file.

    It has so many objects, and so little garbage, that collections would take most of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text("utf-8"))
    finally:
        gc.freeze()  # later collections need not visit the tree either
        if collects:
            gc.enable()


@cache
def texts(path: Path) -> tuple[tuple[bool, int, str], ...]:
    """The comments and strings of a file: whether it is a comment, its first line, its text."""
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    with path.open(encoding="utf-8") as source:
        return tuple(
            (token.type == tokenize.COMMENT, token.start[0], token.string)
            for token in tokenize.generate_tokens(source.readline)
            if token.type == tokenize.COMMENT or token.type in strings
        )
