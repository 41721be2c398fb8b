"""Log-probabilities in the form of the legacy completions: four lists of one length.

It is what lm-eval's `local-completions` reads. It takes the answer to be one token longer than
the prompt, so with `echo` the end of the sequence is listed as a token too: empty, without a
probability.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any


class LegacyLogprobs:
    """Turns the wire's entries of one choice into the lists, and keeps count of the text."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def convert(self, entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The lists of the next entries; a prompt's say themselves what they add to the text."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry in entries:
            lists["tokens"].append(entry["token"])
            lists["token_logprobs"].append(entry["logprob"])
            lists["top_logprobs"].append(_top(entry))
            lists["text_offset"].append(self._offset)
            added = entry.get("text")
            self._offset += len(
                self._decoder.decode(bytes(entry["bytes"])) if added is None else added
            )
        return lists


END: dict[str, Any] = {"token": "", "bytes": [], "logprob": None, "top_logprobs": [], "text": ""}
"""The entry of an end of sequence."""


def _top(entry: dict[str, Any]) -> dict[str, float] | None:
    """The alternatives by their texts; the token itself is always among them (OpenAI's rule)."""
    if entry["logprob"] is None:
        return None
    top = {entry["token"]: entry["logprob"]}
    for other in entry["top_logprobs"]:
        top[other["token"]] = max(other["logprob"], top.get(other["token"], other["logprob"]))
    return top
