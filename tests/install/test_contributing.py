"""The examples in CONTRIBUTING.md pick tests that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_example_picks_tests() -> None:
    examples = re.findall(r'make test TESTS="([^"]+)"', (ROOT / "CONTRIBUTING.md").read_text())
    assert len(examples) >= 3
    for example in examples:
        *paths, last = shlex.split(example)
        word = "" if "-k" not in paths else last
        paths = paths[: paths.index("-k")] if word else [*paths, last]
        assert all((ROOT / path).exists() for path in paths), example
        if word.islower():  # NAME stands for any
            named = re.compile(rf"def test_\w*{word}")
            assert any(named.search((ROOT / path).read_text()) for path in paths), example
