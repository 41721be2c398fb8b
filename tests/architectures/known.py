"""Writes docs/models-known.md from the results of `make test-models`, on stdout.

python -m tests.architectures.known build/models.xml
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

_HEAD = """# Models that were checked

Written by `make test-models` from its results; not by hand. Each row is a small checkpoint with
random weights in the real shape of its family, in float32, held to plain forward passes of mlx-lm
{lm} or mlx-vlm {vlm} over at least 48 tokens.
"""
_TEXT = """
## Text

`tests/architectures/test_architectures.py`. **alone**: three requests, one after the other.
**company**: four that join and leave each other; *in turn* where the model cannot be batched
rightly, so that requests wait for each other. **turns**: answers that go on from stored KV.
**chat**: a next turn without what opened the answer begins with the KV before it. **cancelled**: so
does a prompt whose first request was cancelled while it was read.

| model type | alone | company | turns | chat | cancelled |
|---|---|---|---|---|---|
"""
_SEEING = """
## With images

`tests/engine/vision/test_families.py`: a text, one image and two, alone, in company, and in a
second turn.

| family | right |
|---|---|
"""
_MARK = {"True": "yes", "False": "**no**"}


def main() -> None:
    cases = [case for report in sys.argv[1:] for case in _cases(Path(report))]
    text = {name: found for test, name, found in cases if test.startswith("test_it_answers_as")}
    seeing = {name: found for test, name, found in cases if test.startswith("test_a_family_says")}
    head = _HEAD.format(lm=version("mlx-lm"), vlm=version("mlx-vlm"))
    rows = [f"| {name} | {_columns(found)} |\n" for name, found in sorted(text.items())]
    images = [f"| {name} | {_MARK[found['passed']]} |\n" for name, found in sorted(seeing.items())]
    print("".join((head, _TEXT, *rows, _SEEING, *images)), end="")


def _cases(report: Path) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """The test, the family, and what was recorded of it."""
    for case in ET.parse(report).iter("testcase"):
        test, _, name = case.get("name", "").partition("[")
        found = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        failed = case.find("failure") is not None or case.find("error") is not None
        yield test, name.rstrip("]"), found | {"passed": str(not failed)}


def _columns(found: Mapping[str, str]) -> str:
    if why := found.get("unbuilt"):
        return f"not built here: {why} | | | | "
    marks = [_MARK[found.get(name, "False")] for name in ("alone", "company", "turns")]
    if found.get("batched") == "False":
        marks[1] = re.sub("yes", "in turn", marks[1])
    marks += [_MARK[found.get(name, "False")] for name in ("reused", "kept")]
    return " | ".join(marks)


if __name__ == "__main__":
    main()
