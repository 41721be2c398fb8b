"""Finds chat templates in the files of a checkpoint, in all forms that transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_TOKENIZER = "tokenizer_config.json"
OF_PROCESSORS = ("chat_template.json", "processor_config.json")
IN_TEXT = ("chat_template.jinja", "additional_chat_templates/*.jinja")


def template_in(stated: Mapping[str, Any]) -> Any:
    """Return the template, or templates by name, in a JSON file; None for values of other types.

    stated: the contents of the file.
    """
    template = stated.get("chat_template")
    if isinstance(template, list):
        named = (item for item in template if isinstance(item, dict))
        template = {str(item.get("name")): item.get("template") for item in named}
    if isinstance(template, dict):
        return {name: text for name, text in template.items() if isinstance(text, str)}
    return template if isinstance(template, str) else None
