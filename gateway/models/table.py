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

The gateway serves the models that its models folder describes: one YAML file per model, with
LocalAI's keys. LocalAI's own files can be used as they are, except for the keys refused below.

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

Only `parameters.model` is required. A file with an unknown key, a value of the wrong type or a name
that is already taken is skipped with an error in the log; requests for its model get the same
error, and all other models are served. The folder is watched: new, changed and deleted files take
effect within two seconds, or at once on SIGHUP. A model whose file has changed is unloaded when its
last request has ended.

A checkpoint in the models folder (a folder with a `config.json`) that no file refers to is served
with default settings, under the name of its folder.

A sampling value that a request does not set comes from `parameters`, else from the checkpoint's
`generation_config.json` (temperature, top_p, top_k, min_p, typical_p and the penalties;
`do_sample: false` is a temperature of 0), else it is OpenAI's default. `/models` and the page's
settings show the resulting values. A hub checkpoint's `generation_config.json` is used once the
checkpoint is on this machine. Model files are trusted: they may name any path and any command.

## Keys
"""

_BACKENDS = """\
## Which backend is used

Without `backend` and `address`, the gateway starts its own `run.sh` on a free loopback port, with a
token that only the two processes know. Another `run.sh`, given by its absolute path, is started the
same way and must accept `--addr HOST:PORT`. The backend ends with the gateway, even if the gateway
is killed. A backend at an `address` is sent LoadModel, and Free when its model is unloaded; if the
gateway's environment has LOCALAI_GRPC_AUTH_TOKEN, calls carry that token. Such a backend holds one
model at a time: files, adapters and draft models with the same `address` take turns, and each waits
until nobody uses the previous one. If the backend has lost its model, because it was restarted or
somebody else freed it, the next request loads it again.

`adapters` and `draft_models` list what a request may choose in addition to the model. Each choice
is loaded as a model of its own, in its own backend process if there is no `address`, and counts as
one model where the number of loaded models is limited.

## LocalAI keys without effect

"""

_REFUSED = """\
## LocalAI keys that are refused

They are accepted only if they are empty, zero or false.

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
