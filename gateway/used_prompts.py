"""Stores by model the beginnings that chats use most: system messages and tools.

They are read again after a load, so that the first turn of an agent need not wait for its long
system prompt. A file with owner-only permissions stores them for the next run. No answer, log line
or metric ever contains them.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from pydantic import TypeAdapter, ValidationError

from wire import backend_pb2 as pb

MOST_PROMPTS = 4  # stored for a model
_MOST_SEEN = 32  # prompts of a model whose uses are counted
_SHORTEST, _LONGEST = 1000, 1 << 20  # characters: reading a shorter one takes no time
_LARGEST_FILE = 16 << 20
# Metadata that also changes how a chat template writes the beginning of a prompt.
_VARIABLES = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "mlx.thinking_budget")
_STORED = TypeAdapter(dict[str, list[dict[str, Any]]])


@dataclass(slots=True)
class _Used:
    prompt: pb.PredictOptions
    count: int = 0  # requests of this run
    stored: bool = False  # by an earlier run


class UsedPrompts:
    """The beginnings of prompts, with the number of their uses.

    folder: the folder of the file; None: nothing is counted or stored.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = folder and folder / "gateway" / "used-prompts.json"
        self._seen: dict[str, OrderedDict[bytes, _Used]] = {}
        for model, prompts in self._read().items():
            for given in prompts:
                with suppress(json_format.ParseError):
                    prompt = json_format.ParseDict(given, pb.PredictOptions())
                    self._of(model)[_digest(prompt)] = _Used(prompt, stored=True)

    def note(self, model: str, request: pb.PredictOptions) -> None:
        """Count the beginning of a chat, if it is long enough to matter."""
        if self._file is None or (prompt := beginning(request)) is None:
            return
        seen, key = self._of(model), _digest(prompt)
        used = seen.setdefault(key, _Used(prompt))
        used.count += 1
        seen.move_to_end(key)
        if len(seen) > _MOST_SEEN:
            seen.popitem(last=False)

    def of(self, model: str) -> list[pb.PredictOptions]:
        """Return the most used beginnings of this run, then those of the previous run."""
        repeated = [
            used for used in reversed(self._of(model).values()) if used.stored or used.count > 1
        ]
        repeated.sort(key=lambda used: -used.count)
        return [used.prompt for used in repeated[:MOST_PROMPTS]]

    def save(self) -> None:
        """Write the file. If that fails, the next run begins without it."""
        used = {model: prompts for model in self._seen if (prompts := self.of(model))}
        if self._file is None or not used:
            return
        stored = self._read() | {
            model: [json_format.MessageToDict(prompt) for prompt in prompts]
            for model, prompts in used.items()
        }
        fresh = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            fresh.touch(mode=0o600, exist_ok=False)
            fresh.write_text(json.dumps(stored), encoding="utf-8")
            fresh.replace(self._file)

    def _of(self, model: str) -> OrderedDict[bytes, _Used]:
        return self._seen.setdefault(model, OrderedDict())

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        with suppress(OSError, ValidationError):
            if self._file is not None and self._file.stat().st_size <= _LARGEST_FILE:
                return _STORED.validate_json(self._file.read_bytes())
        return {}


def beginning(request: pb.PredictOptions, shortest: int = _SHORTEST) -> pb.PredictOptions | None:
    """Return a request that reads the system messages and tools of a chat, and generates nothing.

    None if the chat has fewer characters of them than `shortest`.
    """
    if not request.UseTokenizerTemplate:
        return None
    system = [*takewhile(lambda message: message.role == "system", request.Messages)]
    tools = "" if request.ToolChoice == "none" else request.Tools
    length = len(tools) + sum(len(message.content) for message in system)
    if not shortest <= length <= _LONGEST:
        return None
    # A backend of another kind generates one token.
    prompt = pb.PredictOptions(UseTokenizerTemplate=True, Tools=tools, Tokens=1)
    prompt.Messages.extend(system)
    prompt.Messages.add(role="user", content=".")  # many templates need a question
    prompt.Metadata.update(
        {key: request.Metadata[key] for key in _VARIABLES if key in request.Metadata}
    )
    prompt.Metadata["mlx.prompt_only"] = "true"
    return prompt


def _digest(prompt: pb.PredictOptions) -> bytes:
    return blake2b(prompt.SerializeToString(deterministic=True), digest_size=16).digest()
