"""Every import leads downward: the layers of the code, and which libraries each part may load."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import tree

ROOT = Path(__file__).parents[1]
PARTS = ("common", "backend", "gateway", "cli")
ENGINE = "backend.engine"

# The layers, from the bottom. A module may import its own layer and those below, in functions and
# for type checkers too. It belongs to the layer that names the module, or else to that of its
# package. A module that is named apart from its package is plain data that every layer uses, or
# assembles what other layers offer.
LAYERS = {
    "common": "common",
    "formats": """
        common.formats common.gbnf common.call_grammar common.chat_format
        common.chat_parser common.abilities
    """,
    "base": f"""
        {ENGINE}.errors {ENGINE}.events {ENGINE}.request {ENGINE}.generation {ENGINE}.outbox
        {ENGINE}.units {ENGINE}.load_request {ENGINE}.patching {ENGINE}.setting_rule
        {ENGINE}.settings {ENGINE}.threads
        {ENGINE}.blas_threads {ENGINE}.engine_state {ENGINE}.heartbeat
        {ENGINE}.token_text {ENGINE}.recent
        {ENGINE}.constraints.spec {ENGINE}.disk_cache.use {ENGINE}.embedding.encoding
        {ENGINE}.executing.score_plan {ENGINE}.media.limits {ENGINE}.speech.transcript
        {ENGINE}.vision.media_plan
    """,
    "files": f"""
        {ENGINE}.loading.stages {ENGINE}.loading.folder
        {ENGINE}.loading.shards {ENGINE}.loading.architectures {ENGINE}.loading.earlier_fields
        {ENGINE}.loading.model_reference {ENGINE}.loading.hub_process {ENGINE}.loading.adapters
        {ENGINE}.loading.peft {ENGINE}.prompting.control_tokens {ENGINE}.prompting.template_limits
        {ENGINE}.ranks.rank_info
    """,
    "checkpoint": f"""
        {ENGINE}.loading.checkpoint {ENGINE}.disk_cache.identity {ENGINE}.vision.families
        {ENGINE}.embedding.kind {ENGINE}.embedding.encoder_shape
    """,
    "planning": f"{ENGINE}.planning",
    "device": f"""
        {ENGINE}.device {ENGINE}.mlx_lm_import {ENGINE}.rotary_angles {ENGINE}.small_attention
        {ENGINE}.cpu_kernels
        {ENGINE}.caching.shared_numbers
    """,
    "caches": f"{ENGINE}.caching",
    "choice": f"{ENGINE}.sampling {ENGINE}.constraints",
    "parts of a model": f"""
        {ENGINE}.loading {ENGINE}.prompting {ENGINE}.media {ENGINE}.vision {ENGINE}.ranks
        {ENGINE}.disk_cache {ENGINE}.experts
    """,
    "passes": f"""
        {ENGINE}.executing {ENGINE}.drafting {ENGINE}.embedding {ENGINE}.speech
        {ENGINE}.vision.media_prefill {ENGINE}.model {ENGINE}.served_model {ENGINE}.commands
    """,
    "loop": f"""
        {ENGINE}.scheduler {ENGINE}.worker {ENGINE}.output {ENGINE}.ranks.leading_executor
    """,
    "builders": f"""
        {ENGINE}.loading.text_builder {ENGINE}.vision.vision_builder
        {ENGINE}.embedding.embedding_builder {ENGINE}.speech.speech_builder
        {ENGINE}.loading.traits {ENGINE}.executing.warm_up {ENGINE}.loading.serving_trial
    """,
    "loads": f"{ENGINE}.loading.loader {ENGINE}.ranks.follower",
    "front": f"{ENGINE}.engine {ENGINE}.preparing",
    "rpc": "backend.rpc",
    "processes": "backend.supervising backend.__main__",
    "gateway": "gateway",
    "models": "gateway.models",
    "supervision": """
        gateway.supervisor gateway.access gateway.asking gateway.context gateway.greeting
        gateway.metrics gateway.server
    """,
    "openai": "gateway.openai gateway.tagged",
    "other APIs": "gateway.anthropic gateway.ollama gateway.responses",
    "routes": "gateway.routes gateway.app gateway.__main__",
    "command": "cli",
}
LAYER_OF = {name: at for at, names in enumerate(LAYERS.values()) for name in names.split()}

# Packages and libraries that a part never imports.
NEVER = {
    "common": "backend gateway cli wire grpc",
    "backend": "gateway cli",
    ENGINE: "wire grpc google",
    f"{ENGINE}.planning": "mlx mlx_lm mlx_vlm transformers",
    f"{ENGINE}.prompting": "mlx mlx_lm mlx_vlm",
    f"{ENGINE}.media": "mlx mlx_lm mlx_vlm",
    "backend.supervising": "grpc mlx",
    "gateway": "backend cli mlx",
    "cli": "backend",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its name."""
    paths = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    return {name_of(path): tree(path) for path in paths}


@cache
def statements(name: str) -> tuple[tuple[ast.Import | ast.ImportFrom, bool], ...]:
    """The imports of a module and of its functions, and whether they are only for type checkers.

    Only blocks are searched, because expressions contain no imports.
    """
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
    searched: list[tuple[ast.AST, bool]] = [(modules()[name], False)]
    while searched:
        node, typing = searched.pop()
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, block, ())
            for each in inner if isinstance(inner, list) else ():
                match each:
                    case ast.Import() | ast.ImportFrom():
                        found.append((each, typing))
                    case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                        searched.append((each, True))
                    case _:
                        searched.append((each, typing))
    return tuple(found)


@cache
def imports(name: str, *, types: bool) -> frozenset[str]:
    """The modules that a module imports: ours by their full name, those of libraries too.

    types: whether imports for type checkers count.
    """
    found: set[str] = set()
    for node, typing in statements(name):
        if typing and not types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{name} has a relative import"
            module = node.module or ""
            both = {(module, f"{module}.{alias.name}") for alias in node.names}
            found |= {inner if inner in modules() else module for module, inner in both}
    return frozenset(found - {name})


@cache
def layer_of(name: str) -> int:
    """The number of a module's layer: that of the longest name in LAYERS that it begins with."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (layer := LAYER_OF.get(".".join(parts[:end]))) is not None:
            return layer
    raise AssertionError(f"{name} has no layer: add it to LAYERS")


def ours(*, types: bool) -> dict[str, frozenset[str]]:
    """By module, the modules of this project that it imports."""
    return {name: imports(name, types=types) & modules().keys() for name in modules()}


def test_no_import_leads_to_a_higher_layer() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in ours(types=True).items()
        for other in sorted(others)
        if layer_of(other) > layer_of(name)
    ]
    assert upward == []


def test_no_module_imports_itself_through_others() -> None:
    TopologicalSorter(ours(types=False)).prepare()  # which raises CycleError


def package_of(name: str) -> tuple[int, str]:
    """The part of a package, or the single module beside packages, that is in one layer."""
    parts = name.split(".")
    return layer_of(name), ".".join(parts[: 3 if name.startswith(ENGINE) else 2])


def test_no_package_imports_itself_through_others_of_its_layer() -> None:
    packages: dict[tuple[int, str], set[tuple[int, str]]] = {}
    for name, others in ours(types=True).items():
        if others:
            found = packages.setdefault(package_of(name), set())
            found |= {package_of(other) for other in others} - {package_of(name)}
    TopologicalSorter(packages).prepare()  # which raises CycleError


def test_every_name_in_the_table_is_a_module() -> None:
    assert LAYER_OF.keys() <= modules().keys()
    assert NEVER.keys() <= modules().keys()


@pytest.mark.parametrize("part", NEVER)
def test_a_part_never_imports_what_belongs_to_others(part: str) -> None:
    never = set(NEVER[part].split())
    own = [name for name in modules() if f"{name}.".startswith(f"{part}.")]
    leaks = {
        name: leak
        for name in own
        if (leak := {other.split(".")[0] for other in imports(name, types=True)} & never)
    }
    assert leaks == {}


def test_the_picture_in_the_documentation_shows_every_layer() -> None:
    drawn = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert [layer for layer in LAYERS if f"**{layer}**" not in drawn] == []
