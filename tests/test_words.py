"""Docstrings, comments, messages, documents and the page use the words of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import texts, tree

ROOT = Path(__file__).parents[1]
PYTHON = ("backend", "bench", "cli", "common", "gateway", "scripts")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md")
SCRIPTS = "gateway/page/*.js"

# By preferred word: the words that it replaces. Code in backticks is not searched.
WORDS = {
    "fingerprint": r"\blikeness(es)?\b",
    "reference forward pass": r"\bplain (forward )?pass(es)?\b",
    "image": r"\bpictures?\b",
    "broadcast": r"\bspread(s|ing)? the tokens\b",
    "padding": r"\bholes?\b",
    "unused rows": r"\bspare (rows?|ones?)\b",
    "message": r"\bsentences?\b",
    "distinguish, learn, inform": r"\b(told|hears?|heard)\b",
    "one per line": r"\bone a (line|file|row|pass|step|token|request|sequence)\b",
    "accepts": r"\btakes? (no|only|neither) (text|images?|audio|videos?|adapter|descriptor|one\b)",
    "stores": r"\bkeeps? (its |the |their )?(KV|keys and values)\b",
}

_ANY = re.compile("|".join(WORDS.values()), re.IGNORECASE)
# Text in which such a word means something else.
ALLOWED = (
    "sentence-transformers",  # the library
    "fim▁hole",  # a token
    "end▁of▁sentence",  # a token
    "in two sentences",  # these are sentences
    "one sentence what you do",
    "rest of a sentence whose subject",
    'end of a sentence that begins "the model',
    "punctuation of the sentence",
    "sentence of reasoning",
    "example in a sentence",
    "sentences would run together",
)


def _comments_and_strings(path: Path) -> Iterator[tuple[int, str]]:
    for _, first, text in texts(path):
        yield from enumerate(text.splitlines(), first)


@cache
def _docstrings_and_comments(path: Path) -> tuple[tuple[int, str], ...]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = path.read_text("utf-8").splitlines()
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            found += enumerate(map(str.strip, lines[first - 1 : last]), first)
    return (*found, *((first, text) for comment, first, text in texts(path) if comment))


def _page_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and quoted texts of a script; in templates `${}` is code."""
    for number, line in enumerate(source.splitlines(), 1):
        line = re.sub(r"\$\{[^}]*\}", "", line)
        if (stripped := line.strip()).startswith(("//", "*", "/**")):
            yield number, stripped
        else:
            for text in re.findall(r'"[^"]*"|`[^`]*`|//.*', line):
                yield number, text.strip('`"')


def _prose() -> Iterator[tuple[str, int, str]]:
    for folder in PYTHON:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for number, line in _comments_and_strings(path):
                yield str(path.relative_to(ROOT)), number, line
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                yield str(path.relative_to(ROOT)), number, line
    for path in sorted(ROOT.glob(SCRIPTS)):
        for number, line in _page_prose(path.read_text()):
            yield str(path.relative_to(ROOT)), number, line


def _avoided(line: str) -> list[str]:
    """Return the preferred words that the line should use."""
    if not _ANY.search(line):
        return []
    for allowed in ALLOWED:
        line = re.sub(re.escape(allowed), "", line, flags=re.IGNORECASE)
    line = re.sub(r"`[^`]*`|\{[^{}]*\}|[\"']\w+[\"']", "", line)  # code, and keys of dictionaries
    return [word for word, pattern in WORDS.items() if re.search(pattern, line, re.IGNORECASE)]


# Folders whose docstrings and comments do without words that have several meanings.
PLAIN_FOLDERS = (
    "gateway",
    "backend/rpc",
    "backend/supervising",
    "backend/engine/caching",
    "backend/engine/constraints",
    "backend/engine/disk_cache",
    "backend/engine/drafting",
    "backend/engine/embedding",
    "backend/engine/experts",
    "backend/engine/media",
    "backend/engine/prompting",
    "backend/engine/ranks",
    "backend/engine/sampling",
    "backend/engine/speech",
    "backend/engine/vision",
    "cli",
    "common",
)
OTHER_FOLDERS = ("common/formats/", "common/call_grammar/")
_UNCLEAR = re.compile(
    r"\b(guess(es|ed)?|rooms?|places?|entry|entries|openings?|sounds?|told|heard|held|said)\b",
    re.IGNORECASE,
)


def _is_unclear(line: str) -> bool:
    """Return whether a line has such a word, except in code and as the name of an argument."""
    line = re.sub(r"`[^`]*`", "", line)
    return bool(_UNCLEAR.search(re.sub(r"^\s*\w+(, \w+)*: ", "", line)))


def test_docstrings_and_comments_have_no_unclear_words() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for folder in PLAIN_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not (name := str(path.relative_to(ROOT))).startswith(OTHER_FOLDERS)
        for number, line in _docstrings_and_comments(path)
        if _is_unclear(line)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "unclear"),
    [
        ("# in place of the others", True),
        ("    One entry per token.", True),
        ("    place: its index among the blocks", False),
        ("# `place` is the index", False),
    ],
)
def test_an_unclear_word_is_found_in_prose(line: str, unclear: bool) -> None:
    assert _is_unclear(line) is unclear


def test_prose_uses_the_preferred_words() -> None:
    found = [
        f"{name}:{number}: {word}: {line.strip()}"
        for name, number, line in _prose()
        for word in (() if name == "CONTRIBUTING.md" and line.startswith("| ") else _avoided(line))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("The pictures of a request", ["image"]),
        ("A `picture` of the request", []),
        ("sentence-transformers writes one a line", ["one per line"]),
        ("compared with plain forward passes", ["reference forward pass"]),
        ("raises a sentence that says why", ["message"]),
        ("this takes a second", []),
        ("layers that keep keys and values", ["stores"]),
        ("the FIM token <｜fim▁hole｜>", []),
    ],
)
def test_a_word_is_found_where_it_is_prose(line: str, words: list[str]) -> None:
    assert _avoided(line) == words


def test_the_table_of_words_lists_what_this_test_refuses() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    listed = {row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")}
    assert set(WORDS) <= listed


# What a loop over one of these, or a parameter of such a type, has in hand.
_COLLECTIONS = re.compile(
    r"(^|[._])(sequences|requests|rows|entries|members|joining|running|waiting|reports|messages|layers)\b"
)
_TYPES = re.compile(r"(Sequence|SequenceState|Request|Entry)$")


def _places(search: Callable[[ast.AST], Iterable[int]], word: str = "") -> list[str]:
    """Return the file and line of everything that a search finds in the Python files.

    word: what occurs in each file where the search finds something.
    """
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in PYTHON
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(rf"\b{word}\b", path.read_text())
        for number in search(tree(path))
    ]


def _named_one(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that name an item of `_COLLECTIONS`, or a parameter of `_TYPES`, `one`."""
    for node in ast.walk(tree):
        match node:
            case ast.For() | ast.comprehension():
                names = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
                if "one" in names and _COLLECTIONS.search(ast.unparse(node.iter)):
                    yield node.target.lineno
            case ast.arg(arg="one", annotation=ast.expr() as kind):
                if _TYPES.search(ast.unparse(kind)):
                    yield node.lineno


def test_a_sequence_row_request_or_entry_is_not_named_one() -> None:
    found = _places(_named_one, "one")
    assert not found, found


def test_a_sequence_named_one_is_found() -> None:
    tree = ast.parse("for one, two in zip(self.sequences, x):\n    pass\ndef f(one: Entry): ...\n")
    assert list(_named_one(tree)) == [1, 3]


_NOUN_PHRASE = re.compile(
    r"(The|An?|Each|All|None|Whether|How|What|Which|Where|When|As|On|If|Up|Like|[^A-Z])\b"
)


def _unbegun(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of functions, not properties, whose docstring begins with no verb."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            described = ast.get_docstring(node) or "Return"
            if "property" not in decorators and _NOUN_PHRASE.match(described):
                yield node.lineno


def test_the_docstring_of_a_function_begins_with_a_verb() -> None:
    found = _places(_unbegun)
    assert not found, found


@pytest.mark.parametrize(
    ("described", "begins"), [("The next key.", False), ("Return the next key.", True)]
)
def test_a_docstring_that_does_not_begin_with_a_verb_is_found(described: str, begins: bool) -> None:
    assert begins is not bool(list(_unbegun(ast.parse(f'def f():\n    """{described}"""'))))


def test_a_docstring_lists_one_argument_per_line() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in PYTHON
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in _docstrings_and_comments(path)
        if not line.startswith("#") and re.search(r"[\w`)]\. [a-z_]+(, [a-z_]+)*: ", line)
    ]
    assert not found, found
