"""Builds a response: the events of its stream, and the response object.

Items follow each other: reasoning, message, and one for each call. Every event has the next
sequence number; an item is announced, grows by deltas, and is sent again in full when it is done.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from gateway.blocks import Block, Blocks, Step
from gateway.calls import Done, Event, Piece, Progress, Usage
from gateway.errors import CODES, ApiError
from gateway.models.config import Parameters
from gateway.openai.answer import token_logprob
from gateway.openai.messages import SEAL
from gateway.responses.items import CustomTool, FunctionTool, Offered
from gateway.responses.request import ReasoningConfig, ResponsesRequest, TextConfig
from gateway.sse import NamedEvents

Json = dict[str, Any]
# For each kind of call: the field that has its input.
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
# Fields of the request that a response repeats.
_AS_SENT = (
    "instructions previous_response_id max_output_tokens max_tool_calls user safety_identifier"
    " prompt_cache_key".split()
)
_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class ResponseAnswer(NamedEvents[Event]):
    """A response that is being generated."""

    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        defaults: Parameters,
        tools: Sequence[Offered],
        ended: Callable[[Json], None],
    ) -> None:
        """Start an empty response, with all tools that are offered.

        ended: called with the complete response.
        """
        self._id = f"resp_{uuid.uuid4().hex}"
        self._echo = echo_of(request, defaults) | {"model": model}
        self._tools = {each.name: each for each in tools}
        self._seals = "reasoning.encrypted_content" in (request.include or ())
        summary = request.reasoning and request.reasoning.summary
        self._thought = "summary_text" if summary not in (None, "none") else "reasoning_text"
        self._created = int(time.time())
        self._output: list[Json] = []
        custom = {each.name for each in tools if isinstance(each.tool, CustomTool)}
        self._blocks = Blocks(custom)
        self._logprobs: list[Json] = []  # those of the open message
        self._before: Sequence[Json] = ()  # log-probabilities sent before the first text
        self._number = 0
        self._ended = ended
        self._last: Json = self._response("in_progress")

    def whole(self) -> Json:
        """Return the complete response, without an incomplete call."""
        output = self._last["output"]
        kept = [item for item in output if item["status"] != "incomplete" or "call_id" not in item]
        return self._last | {"output": kept}

    def beat(self) -> list[Json]:
        start = [] if self._number else [self._event("response.created", response=self._last)]
        return [*start, self._event("response.in_progress", response=self._last)]

    def take(self, event: Event) -> list[Json]:
        events = [] if self._number else self.beat()
        if isinstance(event, Progress):
            return events
        logprobs: list[Json] = []
        if isinstance(event, Piece) and event.content:
            block, found = self._blocks.open, event.logprobs
            if event.reasoning or block is None or block.kind != "text":
                found = tuple(of_text(event.content, self._before, found))
            logprobs = [*map(token_logprob, found)]
        for step in self._blocks.take(event):
            events += self._step(step, logprobs)
        if isinstance(event, Done):
            return events + self._end(event)
        self._before = () if event.content else event.logprobs
        return events

    def fail(self, error: ApiError) -> list[Json]:
        events = [] if self._number else self.beat()
        if (block := self._blocks.open) is not None:
            self._finish(block, "incomplete")
        # OpenAI has few codes here. One that a backend sent beside its status is more exact.
        code = error.code if error.code in CODES else _CODES.get(error.status, "server_error")
        described = {"code": code, "message": error.message}
        self._last = self._response("failed", error=described)
        return [*events, self._event("response.failed", response=self._last)]

    def _step(self, step: Step, logprobs: list[Json]) -> list[Json]:
        events: list[Json] = []
        block, text = step.block, step.text
        if step.verb == "begin":
            events.append(self._begin(block))
            if block.kind != "call":
                events.append(self._part("added", self._content(block, "", [])))
        if block.kind == "call" and text:
            kind = self._output[-1]["type"]
            events.append(self._of_item(f"response.{kind}_{_CALLS[kind]}.delta", delta=text))
        elif block.kind == "reasoning" and step.verb != "end":
            events.append(self._of_part(self._thought, "delta", delta=text))
        elif block.kind == "text" and step.verb != "end":
            self._logprobs += logprobs
            events.append(self._of_part("output_text", "delta", delta=text, logprobs=logprobs))
        return events + (self._close(block) if step.verb == "end" else [])

    def _begin(self, block: Block) -> Json:
        kind, fields = "message", Json(role="assistant", content=[])
        if block.kind == "reasoning":
            kind, fields = "reasoning", Json(summary=[], content=[])
        elif block.kind == "call":
            kind = "custom_tool_call" if block.custom else "function_call"
            called = self._tools.get(block.call.name)
            fields = {"call_id": block.call.id, "name": block.call.name}
            if called is not None and called.namespace:
                fields |= {"name": called.tool.name, "namespace": called.namespace}
            fields[_CALLS[kind]] = ""
        item = {"type": kind, "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"}
        self._output.append(item | {"status": "in_progress"} | fields)
        return self._item("added")

    def _close(self, block: Block) -> list[Json]:
        """Send the item of a block that has ended in full."""
        done = self._blocks.done
        # The limit may be reached directly after a complete call, and a stop string within one.
        cut = done is not None and done.finish_reason == "length"
        called = block.kind == "call"
        complete = block.whole if called and (cut or not block.custom) else called or not cut
        item = self._finish(block, "completed" if complete else "incomplete")
        if (kind := item["type"]) in _CALLS:
            field = _CALLS[kind]
            named = {"name": item["name"]} if kind == "function_call" else {}
            done_event = self._of_item(
                f"response.{kind}_{field}.done", **named, **{field: item[field]}
            )
            return [done_event, self._item("done")]
        (part,) = item.get("summary") or item["content"]
        fields = {name: part[name] for name in ("text", "logprobs") if name in part}
        text = self._of_part(part["type"], "done", **fields)
        return [text, self._part("done", part), self._item("done")]

    def _finish(self, block: Block, status: str) -> Json:
        # A new object, because the one that was announced has been returned in an event.
        item = self._output[-1] | {"status": status}
        if block.kind == "call":
            item[_CALLS[item["type"]]] = block.text
        elif block.kind == "reasoning":
            place = "summary" if self._thought == "summary_text" else "content"
            item[place] = [self._content(block, block.text, self._logprobs)]
            item |= {"encrypted_content": SEAL + block.text} if self._seals else {}
        else:
            item["content"] = [self._content(block, block.text, self._logprobs)]
        self._output[-1] = item
        self._logprobs = []
        return item

    def _content(self, block: Block, text: str, logprobs: list[Json]) -> Json:
        """Return the only part of reasoning or of a message."""
        if block.kind == "reasoning":
            return {"type": self._thought, "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _end(self, done: Done) -> list[Json]:
        cut = done.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        self._last = self._response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            completed_at=None if cut else int(time.time()),
            usage=usage_of(done.usage),
        )
        self._ended(self.whole())
        return [self._event(f"response.{status}", response=self._last)]

    def _response(self, status: str, **fields: Any) -> Json:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output),
            "usage": None,
            **self._echo,
            **fields,
        }

    def _item(self, verb: str) -> Json:
        index = len(self._output) - 1
        name = f"response.output_item.{verb}"
        return self._event(name, output_index=index, item=self._output[index])

    def _part(self, verb: str, part: Json) -> Json:
        if part["type"] == "summary_text":
            name, place = "reasoning_summary_part", "summary_index"
        else:
            name, place = "content_part", "content_index"
        return self._of_item(f"response.{name}.{verb}", part=part, **{place: 0})

    def _of_part(self, kind: str, verb: str, **fields: Any) -> Json:
        """Return an event about the text of the open item's only part."""
        if kind == "summary_text":
            return self._of_item(f"response.reasoning_{kind}.{verb}", summary_index=0, **fields)
        return self._of_item(f"response.{kind}.{verb}", content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Json:
        index = len(self._output) - 1
        item_id = self._output[index]["id"]
        return self._event(kind, item_id=item_id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def of_text(text: str, before: Sequence[Json], beside: Sequence[Json]) -> Sequence[Json]:
    """Return the log-probabilities of `text`, selected from those sent before it and with it.

    Tokens that write no text of their own (the end of reasoning, the mark of a channel) are sent
    with the next Reply; if text begins in the same step, the first Reply has the tokens of both. So
    this searches for the first token that writes the text. The tokens may extend beyond the text,
    whose end may be withheld. If no token begins exactly with the text, all of `beside` is
    returned.

    before: the log-probabilities of the Reply directly before the text.
    beside: the log-probabilities of the text's Reply.
    """
    entries = [*before, *beside]
    wanted = text.encode()
    # Backends other than ours may omit the bytes of a token.
    raw = [(entry.get("bytes"), str(entry["token"]).encode()) for entry in entries]
    written = [token if given is None else bytes(given) for given, token in raw]
    whole, starts = b"".join(written), [0, *accumulate(map(len, written))][: len(written)]
    longer = [at for at, start in enumerate(starts) if whole.startswith(wanted, start)]
    exact = [at for at in longer if len(whole) - starts[at] == len(wanted)]
    found = exact or longer
    return entries[found[0] :] if found else beside


def usage_of(used: Usage) -> Json:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }


def echo_of(request: ResponsesRequest, defaults: Parameters) -> Json:
    """Return the request's fields that a response repeats, with the values that were used."""
    text, reasoning = request.text or TextConfig(), request.reasoning or ReasoningConfig()
    return {
        **{name: getattr(request, name) for name in _AS_SENT},
        **{name: defaults.chosen(name, getattr(request, name)) for name in _SAMPLING},
        "tools": [
            tool.model_dump() | {"strict": bool(tool.strict)}
            if isinstance(tool, FunctionTool)
            else tool.model_dump(exclude_none=True)
            for tool in request.tools or ()
        ],
        "tool_choice": _plain(request.tool_choice) or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {
            "format": _plain(text.format) or {"type": "text"},
            "verbosity": text.verbosity or "medium",
        },
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "background": False,
        "store": request.store is not False,
        "service_tier": "default",
        "metadata": request.metadata or {},
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return value.model_dump(by_alias=True, exclude_none=True)
