"""The choices of answers of `/completions`, which are `text_completion` objects."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.generation import Done, Piece
from gateway.openai.answer import OpenAIAnswer
from gateway.openai.completion import CompletionPlan


class LegacyLogprobs:
    """Log-probabilities of one choice in the legacy form: four lists of one length.

    lm-eval's `local-completions` assumes that an answer with `echo` is one token longer than the
    prompt, so the end of the sequence is listed as a token too: empty, without a probability.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def convert(self, entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the four lists for the next tokens, in the form of `logprobs` in a completion."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists: dict[str, list[Any]] = {name: [] for name in names}
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
"""The log-probabilities of an end of sequence."""


def _top(entry: dict[str, Any]) -> dict[str, float] | None:
    """Return the alternatives by their texts, with the token itself (OpenAI's rule)."""
    if entry["logprob"] is None:
        return None
    top = {entry["token"]: entry["logprob"]}
    for other in entry["top_logprobs"]:
        top[other["token"]] = max(other["logprob"], top.get(other["token"], other["logprob"]))
    return top


def completion_answer(head: dict[str, Any], plan: CompletionPlan) -> OpenAIAnswer:
    choices = [_Choice(index, plan) for index in range(len(plan.wanted))]
    return OpenAIAnswer(
        head, choices, usage=plan.usage, progress=plan.progress, per_prompt=plan.per_prompt
    )


class _Choice:
    """One answer: the part that has arrived but has not been sent."""

    def __init__(self, index: int, plan: CompletionPlan) -> None:
        self._index = index
        self._plan = plan
        self._text: list[str] = []
        self._entries: list[dict[str, Any]] = []
        self._logprobs = LegacyLogprobs()
        self._reason: str | None = None
        self._begun = index > 0  # one chunk shows that the request was accepted
        # The prompt's tokens arrive at the end, but are sent before those of the answer.
        self._waits = plan.echo and plan.needs_prompt_entries(index)
        if plan.echo and not self._waits:
            self._text.append(plan.text_of(index))

    def begin(self) -> list[dict[str, Any]]:
        begun, self._begun = self._begun, True
        return [] if begun else [self.nothing()]

    def nothing(self) -> dict[str, Any]:
        return {"index": self._index, "text": "", "logprobs": None, "finish_reason": None}

    def chunks(self, event: Piece | Done) -> Iterator[dict[str, Any]]:
        self.add(event)
        if self._reason is not None or (not self._waits and any(self._text)):
            yield self.whole()

    def add(self, event: Piece | Done) -> None:
        if isinstance(event, Piece):
            self._text.append(event.content)
            self._entries.extend(event.logprobs)
            return
        self._reason = event.finish_reason
        if self._waits:
            prompt = event.prompt_logprobs or ()
            self._text.insert(0, "".join(entry["text"] for entry in prompt))
            self._entries[:0] = prompt
        if self._plan.echo and event.finish_reason == "stop" and event.stop_sequence is None:
            self._entries.append(END)

    def whole(self) -> dict[str, Any]:
        """Return the choice with everything that was not sent yet."""
        text, self._text = "".join(self._text), []
        entries, self._entries = self._entries, []
        return {
            "index": self._index,
            "text": text,
            "logprobs": None if self._plan.logprobs is None else self._logprobs.convert(entries),
            "finish_reason": self._reason,
        }
