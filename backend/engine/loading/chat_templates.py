"""Finds a checkpoint's chat template, in any file where transformers or mlx-lm stores templates.

A few families have no template, because their processors write the prompt around one question.
`templates/` has templates for them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backend.engine.errors import Unusable
from backend.engine.loading.json_files import read_object
from common.template_files import OF_PROCESSORS, OF_TOKENIZER, template_in

# Settings that name a module of mlx-lm, and the package of that module.
_MODULES = {
    "chat_template_type": "mlx_lm.chat_templates",
    "tool_parser_type": "mlx_lm.tool_parsers",
}
# PaliGemma has no roles. GOT-OCR was trained with one question after its system message.
_TEMPLATES = Path(__file__).parent / "templates"
_OF_FAMILIES = ("got", "paligemma")


def has_template(path: Path) -> bool:
    """Return whether a folder has a chat template."""
    stated = template_in(_object_in(path / OF_TOKENIZER)) or _template_of_processor(path)
    return _in_a_file(path) or bool(stated)


def template_arguments(path: Path, model_type: str) -> dict[str, Any]:
    """Return the arguments that give a tokenizer its template; empty if none are needed.

    A module that a checkpoint names is ignored if the installed mlx-lm does not have it.
    """
    arguments: dict[str, Any] = {}
    stated = _object_in(path / OF_TOKENIZER)
    for key, package in _MODULES.items():
        name = stated.get(key)
        if name and not (str(name).isidentifier() and find_spec(f"{package}.{name}")):
            arguments[key] = None
    if not _in_a_file(path):
        own = template_in(stated)
        template = own or _template_of_processor(path)
        if not template and model_type.lower() in _OF_FAMILIES:
            template = (_TEMPLATES / f"{model_type.lower()}.jinja").read_text().strip()
        if template or own != stated.get("chat_template"):
            arguments["chat_template"] = template or own
    return arguments


def _in_a_file(path: Path) -> bool:
    return (path / "chat_template.jinja").exists() or (path / "additional_chat_templates").is_dir()


def _template_of_processor(path: Path) -> Any:
    stated = (template_in(_object_in(path / name)) for name in OF_PROCESSORS)
    return next(filter(None, stated), None)


def _object_in(file: Path) -> dict[str, Any]:
    """Return the object in a file; {} for a broken file, which a library will report later."""
    try:
        return read_object(file)
    except (Unusable, OSError):
        return {}
