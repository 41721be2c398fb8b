"""Which parts of a text are code, however it is split."""

from __future__ import annotations

import pytest

from common.formats.markdown import Markdown


@pytest.mark.parametrize(
    ("text", "quoted", "fenced"),
    [
        ("a ", False, False),
        ("a `", True, False),
        ("a `b` ", False, False),
        ("a ``b` ", True, False),
        ("a `b\n", False, False),
        ("```", True, True),
        ("```py\nx\n", True, True),
        ("```py\nx\n```\n", False, False),
        ("```py\nx\n```", False, False),
        ("````\n```\n", True, True),
        ("~~~\n```\n", True, True),
        ("   ```\n", True, True),
        ("    ```\n", False, False),
        ("```x``` ", False, False),
        ("x ```\n", False, False),
    ],
)
def test_code_is_found_in_any_split(text: str, quoted: bool, fenced: bool) -> None:
    for pieces in ([text], list(text)):
        markdown = Markdown()
        for piece in pieces:
            markdown.feed(piece)
        assert (markdown.quoted, markdown.fenced) == (quoted, fenced)
