"""OpenAI's answers, with one or several choices: whole, or as chunks, usage and `[DONE]`.

A chunk is sent for every few letters of every stream, so writing one is the gateway's hot path: it
encodes one small object and uses no pydantic models. The text is ASCII, because some clients treat
U+2028 as the end of a line.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from gateway.blocks import Block, Blocks, Step, consume
from gateway.calls import Done, Event, Piece, Progress, Usage
from gateway.fields import TextRequest
from gateway.models.config import ModelConfig
from gateway.openai.chat_request import ChatCompletionRequest
from gateway.openai.completion import CompletionPlan
from gateway.openai.tools import CustomTool, is_legacy
from gateway.sse import DONE, Answer

Json = dict[str, Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode
Choice: TypeAlias = "_ChatChoice | _CompletionChoice"
# The end of the sequence as a token, because lm-eval's `local-completions` assumes that an answer
# with `echo` is one token longer than the prompt.
_END: Json = {"token": "", "bytes": [], "logprob": None, "top_logprobs": [], "text": ""}


def head_of(prefix: str, kind: str, model: str | None, config: ModelConfig) -> Json:
    """Return the first fields of every object of an answer; `kind` is OpenAI's `object`.

    model: as the client named it. The fingerprint stays the same while the model's file does.
    """
    digest = hashlib.blake2s(config.model_dump_json().encode(), digest_size=5)
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model or config.name,
        "system_fingerprint": f"fp_{digest.hexdigest()}",
    }


def usage_of(answers: Sequence[Usage], per_prompt: int) -> Json:
    """Return the usage of a request: every prompt counts once, however many answers it has.

    per_prompt: how many answers in a row have the same prompt.
    """
    prompts = answers[::per_prompt]
    prompt_count = sum(usage.prompt_tokens for usage in prompts)
    generated = sum(usage.completion_tokens for usage in answers)
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": generated,
        "total_tokens": prompt_count + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in answers)
        },
    }


class OpenAIAnswer(Answer[tuple[int, Event]]):
    """The answers to one request, with the fields of `head` in each of its objects.

    Each choice returns items of `choices`:

    - `begin`: the first chunk, unless it has been sent;
    - `chunks`: the chunks of an event, of which the caller must consume all;
    - `nothing`: a chunk that adds nothing;
    - `whole`: the complete choice, for whose events `add` is called instead of `chunks`.

    If a stream is to have the usage, the last chunk has it, and all others have `"usage": null`, as
    OpenAI's do. `return_progress` of the request adds llama.cpp's `prompt_progress`.

    per_prompt: how many choices in a row have the same prompt.
    """

    def __init__(
        self, head: Json, choices: Sequence[Choice], request: TextRequest, per_prompt: int
    ) -> None:
        self._choices = choices
        self._ends: dict[int, Done] = {}
        self._whole = head
        options = request.stream_options
        self._usage = options is not None and options.include_usage is True
        self._progress = request.return_progress is True
        self._per_prompt = per_prompt
        self._head = f"data: {_encode(head)[:-1]}"
        self._start = f'{self._head},"choices":['
        self._end = '],"usage":null}\n\n' if self._usage else "]}\n\n"

    def take(self, event: tuple[int, Event]) -> list[str]:
        index, arrived = event
        choice = self._choices[index]
        parts = [*map(self._chunk, choice.begin())]
        if not isinstance(arrived, Progress):
            parts += map(self._chunk, choice.chunks(arrived))
        elif self._progress:
            entry, numbers = _encode(choice.nothing()), _encode(progress_of(arrived))
            parts.append(f'{self._start}{entry}],"prompt_progress":{numbers}}}\n\n')
        if isinstance(arrived, Done):
            self._ends[index] = arrived
        if len(self._ends) == len(self._choices):
            if self._usage:
                usage = _encode(self._used())
                parts.append(f'{self._head},"choices":[],"usage":{usage}}}\n\n')
            parts.append(DONE)
        return parts

    def add(self, event: tuple[int, Event]) -> None:
        index, arrived = event
        if not isinstance(arrived, Progress):
            self._choices[index].add(arrived)
        if isinstance(arrived, Done):
            self._ends[index] = arrived

    def beat(self) -> list[str]:
        begun = [entry for choice in self._choices for entry in choice.begin()]
        return [*map(self._chunk, begun or [self._choices[0].nothing()])]

    def whole(self) -> Json:
        choices = [choice.whole() for choice in self._choices]
        return {**self._whole, "choices": choices, "usage": self._used()}

    def _used(self) -> Json:
        ends = [self._ends[index].usage for index in range(len(self._choices))]
        return usage_of(ends, self._per_prompt)

    def _chunk(self, entry: Json) -> str:
        return f"{self._start}{_encode(entry)}{self._end}"


def progress_of(progress: Progress) -> Json:
    """Return llama.cpp's `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.ms),
    }


def _logprobs(entries: Iterable[Json]) -> Json:
    return {"content": [*entries], "refusal": None}


def token_logprob(entry: Json) -> Json:
    """Convert a log-probability of the backend to OpenAI's form, which has no token ids."""
    names = ("token", "bytes", "logprob")
    others = entry.get("top_logprobs") or ()
    top = [{name: other[name] for name in names} for other in others]
    return {**{name: entry[name] for name in names}, "top_logprobs": top}


def _call(block: Block, text: str, *, first: bool) -> Json:
    """Return a part of a call; only the first part has type and name."""
    kind = "custom" if block.custom else "function"
    return {**({"type": kind} if first else {}), kind: _function(block, text, first=first)}


def _function(block: Block, text: str, *, first: bool = True) -> Json:
    name = {"name": block.call.name} if first else {}
    return name | {"input" if block.custom else "arguments": text}


def chat_answer(head: Json, request: ChatCompletionRequest) -> OpenAIAnswer:
    count = request.n or 1
    return OpenAIAnswer(
        head, [_ChatChoice(index, request) for index in range(count)], request, count
    )


class _ChatChoice:
    """One answer. A stream has a chunk with the role, deltas, and one with the finish reason."""

    def __init__(self, index: int, request: ChatCompletionRequest) -> None:
        self._index = index
        self._legacy = is_legacy(request)
        self._shows_reasoning = request.include_reasoning is not False
        self._wants_logprobs = request.wants_logprobs
        self._begun = False
        tools = request.tools or ()
        self._blocks = Blocks({t.custom.name for t in tools if isinstance(t, CustomTool)})
        self._logprobs: list[Json] = []  # those that no chunk has yet

    def begin(self) -> list[Json]:
        if self._begun:
            return []
        self._begun = True
        return [self._part({"role": "assistant", "content": ""})]

    def nothing(self) -> Json:
        return self._part({})

    def add(self, event: Piece | Done) -> None:
        self._note(event)
        consume(self._blocks, event)

    def _note(self, event: Piece | Done) -> None:
        if isinstance(event, Piece) and self._wants_logprobs:
            self._logprobs += map(token_logprob, event.logprobs)

    def chunks(self, event: Piece | Done) -> Iterator[Json]:
        self._note(event)
        for step in self._blocks.take(event):
            if delta := self._delta(step):
                yield self._part(delta, self._unsent())
        if isinstance(event, Done):
            yield self._part({}, self._unsent(), self._reason(event))

    def whole(self) -> Json:
        assert self._blocks.done is not None
        return {
            "index": self._index,
            "message": self._message(),
            "logprobs": _logprobs(self._logprobs) if self._wants_logprobs else None,
            "finish_reason": self._reason(self._blocks.done),
        }

    def _part(self, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _unsent(self) -> Json | None:
        unsent, self._logprobs = self._logprobs, []
        return _logprobs(unsent) if unsent else None

    def _reason(self, end: Done) -> str:
        """Return OpenAI's finish reason: a truncated call counts as length."""
        if end.finish_reason == "stop" and self._blocks.calls:
            return "function_call" if self._legacy else "tool_calls"
        return end.finish_reason

    def _message(self) -> Json:
        answer, calls = self._blocks, self._blocks.calls
        message: Json = {
            "role": "assistant",
            "content": answer.text_of("text") or (None if calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if self._shows_reasoning and (reasoning := answer.text_of("reasoning")):
            message["reasoning_content"] = reasoning
        if calls and self._legacy:
            message["function_call"] = _function(calls[0], calls[0].text)
        elif calls:
            message["tool_calls"] = [
                {"id": block.call.id, **_call(block, block.text, first=True)} for block in calls
            ]
        return message

    def _delta(self, step: Step) -> Json:
        """Return what a step adds; empty if nothing."""
        block, first = step.block, step.verb == "begin"
        if step.verb == "end" and not step.text:
            return {}
        if block.kind != "call":
            shown = block.kind == "text" or self._shows_reasoning
            name = "content" if block.kind == "text" else "reasoning_content"
            return {name: step.text} if shown else {}
        if self._legacy:
            return {"function_call": _function(block, step.text, first=first)}
        call = {"index": block.call.index, **({"id": block.call.id} if first else {})}
        return {"tool_calls": [call | _call(block, step.text, first=first)]}


def _top(entry: dict[str, Any]) -> dict[str, float] | None:
    """Map the alternatives and the token itself to their log-probabilities (OpenAI's rule)."""
    if entry["logprob"] is None:
        return None
    top = {entry["token"]: entry["logprob"]}
    for other in entry["top_logprobs"]:
        top[other["token"]] = max(other["logprob"], top.get(other["token"], other["logprob"]))
    return top


def completion_answer(head: dict[str, Any], plan: CompletionPlan) -> OpenAIAnswer:
    choices = [_CompletionChoice(index, plan) for index in range(len(plan.wanted))]
    return OpenAIAnswer(head, choices, plan.request, plan.per_prompt)


class _CompletionChoice:
    """One answer, and the part of it that was not sent yet."""

    def __init__(self, index: int, plan: CompletionPlan) -> None:
        self._index = index
        self._plan = plan
        self._text: list[str] = []
        self._entries: list[dict[str, Any]] = []
        self._offset = 0  # characters of the tokens that were sent
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reason: str | None = None
        self._begun = index > 0  # one chunk shows that the request was accepted
        # The prompt's tokens arrive at the end, but are sent before those of the answer.
        self._waits = plan.echo and "mlx.prompt_logprobs" in plan.wanted[index].Metadata
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
            self._entries.append(_END)

    def whole(self) -> dict[str, Any]:
        """Return the choice with everything that was not sent yet."""
        text, self._text = "".join(self._text), []
        entries, self._entries = self._entries, []
        return {
            "index": self._index,
            "text": text,
            "logprobs": None if self._plan.logprobs is None else self._lists(entries),
            "finish_reason": self._reason,
        }

    def _lists(self, entries: Iterable[Json]) -> Json:
        """Return log-probabilities of the next tokens in the legacy form: four equal lists."""
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
