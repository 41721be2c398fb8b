"""Links in the documents lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def prose(document: Path) -> str:
    return re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_has_a_target(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(document))):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_that_it_names_exists(document: Path) -> None:
    homes = [ROOT, ROOT / "backend", ROOT / "backend" / "engine", ROOT / "gateway"]
    for path in re.findall(r"`(?!build/)(\w+/[\w/]*\w)(?:\.py|/)?`", prose(document)):
        places = [home / path for home in homes if (home / path.partition("/")[0]).is_dir()]
        found = [one for one in places if one.exists() or one.with_suffix(".py").exists()]
        assert found or not places, path
