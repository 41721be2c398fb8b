"""The tables of families in the documents agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

from backend.engine.embedding.kind import FAMILIES
from backend.engine.vision import families
from tests.engine.vision import test_families as compared

DOCUMENTS = Path(__file__).parents[2] / "docs"
# Shapes that the tests write for a family with another name in the document.
SHAPES_OF = {
    "gemma4_moe": "gemma4",
    "ministral3": "mistral3",
    "mistral4": "mistral3",
    "paligemma2": "paligemma",
}
OF_ONE_IMAGE = {"molmo", "paligemma"}  # by their nature, as the document says elsewhere


def text_of(name: str) -> str:
    return (DOCUMENTS / name).read_text("utf-8")


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_the_embedding_families_are_those_of_the_table() -> None:
    for kind, modules in FAMILIES.items():
        rows = re.findall(
            rf"^\| `{kind.value}` \| (`.*) \|$", text_of("embeddings.md"), re.MULTILINE
        )
        # After the semicolon the row says what is served whatever its family.
        lists = [row.partition(";")[0] for row in rows if "|" not in row]
        (named,) = [set(re.findall(r"`([\w-]+)`", row)) for row in lists]
        assert named == set(modules)


def test_the_refused_vision_families_are_those_of_the_table() -> None:
    table = text_of("vision.md").partition("| families | why |\n")[2].partition("\n\n")[0]
    named = words_of(" ".join(row.split("|")[1] for row in table.splitlines()[1:]))
    special = {name for name, why in families._NOT_SERVED.items() if why != families._OTHER}
    assert named >= special | (set(families._NOT_READ) - set(compared.FAMILIES))


def test_the_compared_vision_families_are_those_of_the_list() -> None:
    before, _, after = text_of("vision.md").partition("muse_spark is untested")
    listed = words_of(before[before.index("\n- Qwen: ") :])
    assert listed >= {SHAPES_OF.get(name, name) for name in compared.FAMILIES}
    hearing = re.findall(r"(\w+) \(with audio\)", before)
    assert set(hearing) == set(compared.HEARING)
    (row,) = re.findall(r"^\| ([^|]*) \| compared with one image only", after, re.MULTILINE)
    alone = {SHAPES_OF.get(name, name) for name in compared._ONE_EACH}
    assert words_of(row) == alone - OF_ONE_IMAGE
