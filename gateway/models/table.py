"""Writes the tables of docs/models.md: `python -m gateway.models.table > docs/models.md`.

The text around them is here as well, so that there is one place; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.models.config import ModelConfig
from gateway.models.foreign import NEUTRAL, REFUSED

_INTRODUCTION = """\
# Model files of the gateway

The gateway serves what its models folder describes: one YAML file a model, in the terms of
LocalAI, so that its files can be taken over as they are.

```yaml
name: qwen
aliases: [gpt-4o-mini]
parameters:
  model: mlx-community/Qwen3-0.6B-4bit
  temperature: 0.6
  top_p: 0.95
context_size: 8192
options:
  - parallel:8
```

Only `parameters.model` has to be there. A file with an unknown key, a value of the wrong type or a
name that is taken already is left out with a sentence in the log; a request for its model is
answered with that sentence, and the others are served. The folder is watched: what is new, changed
or gone counts within two seconds, or at once on SIGHUP; a model whose file has changed is unloaded
when its last request has ended.

A checkpoint (a folder with a `config.json`) in the models folder is a model by the name of its folder,
with all defaults, unless a file is about it.

What a request does not say is taken from `parameters`, else from the checkpoint's
`generation_config.json` (temperature, top_p, top_k, min_p, typical_p and the penalties;
`do_sample: false` is a temperature of 0), else it is OpenAI's default; `/models` and the page's
settings show what counts. A checkpoint of the hub has a say once it is on this machine. The files
belong to the owner of the machine and are trusted: they may name any path and any command.

## Keys
"""

_BACKENDS = """\
## Where a backend comes from

Without `backend` and `address`, the `run.sh` beside the gateway is started on a free port of the
loopback device, with a token that only the two know; so is another `run.sh`, by its absolute path,
which must accept `--addr HOST:PORT`. It ends with the gateway, also if that is killed. A backend at
an `address` is sent LoadModel, and Free when its model is unloaded; if the gateway's environment
has LOCALAI_GRPC_AUTH_TOKEN, calls carry it. It holds one model: files, adapters and draft models
with the same `address` take turns, each when nobody uses the one before. If it has lost its model,
because it was started again or freed by somebody else, the next request loads it anew.

`adapters` and `draft_models` name what a request may choose beside the model. Each choice is loaded
as a model of its own, in a backend of its own if it has no `address`, and counts as one where
loaded models are limited.

## Keys of LocalAI without effect here

"""

_REFUSED = """\
## Keys of LocalAI that are refused

Unless they are empty, zero or false.

"""


def document() -> str:
    """docs/models.md."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    schema = ModelConfig.model_json_schema()
    for key, field in _fields(schema, schema["$defs"], ""):
        default = _default(field)
        rows.append(f"| `{key}` | {_value(field)} | {default} | {field['description']} |")
    neutral = ["| key | why |", "|---|---|", *(f"| `{key}` | {NEUTRAL[key]} |" for key in NEUTRAL)]
    refused = [
        "| key | instead |",
        "|---|---|",
        *(f"| `{key}` | {REFUSED[key]} |" for key in REFUSED),
    ]
    return "\n".join([_INTRODUCTION, *rows, "", _BACKENDS + "\n".join(neutral), "", _REFUSED]) + (
        "\n".join(refused) + "\n"
    )


def _fields(
    schema: Mapping[str, Any], sections: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, field in schema["properties"].items():
        if "$ref" in field:
            section = sections[field["$ref"].rpartition("/")[2]]
            yield from _fields(section, sections, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field | {"required": name in schema.get("required", ())}


def _default(field: Mapping[str, Any]) -> str:
    if field["required"] or field["default"] in (None, "", [], {}):
        return ""
    return f"`{json.dumps(field['default'])}`"


def _value(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:  # or nothing
        return _value(field["anyOf"][0])
    kind = field["type"]
    if kind == "array":
        return f"list of {_value(field['items'])}"
    if kind == "object":
        return "map"
    if kind == "boolean":
        return f"`{json.dumps(field['const'])}`" if "const" in field else "true or false"
    name = {"integer": "a whole number", "number": "a number", "string": "text"}[kind]
    if "minimum" in field:
        name += f" from {field['minimum']}"
    if "maximum" in field:
        name += f" to {field['maximum']}"
    return name


if __name__ == "__main__":
    print(document(), end="")
