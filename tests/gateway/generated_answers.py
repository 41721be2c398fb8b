"""Answers as a backend may give them: reasoning, text and calls in pieces, then the end."""

from __future__ import annotations

from hypothesis import strategies as st

from gateway.calls import Done, Event, Piece, Progress, ToolCallPiece, Usage

_TEXT = st.text(min_size=1, max_size=8)
_ENTRY = {"id": 1, "token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}


def _call(index: int, arguments: list[str]) -> list[Event]:
    first = ToolCallPiece(index, f"call_{index}", "look", arguments[0])
    rest = [ToolCallPiece(index, arguments=part) for part in arguments[1:]]
    return [Piece(tool_calls=(part,)) for part in (first, *rest)]


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """The events of one answer, in the order that backends keep."""
    counts = st.integers(0, 9)
    events: list[Event] = [
        Progress(9, cached, processed, 0.5)
        for cached, processed in draw(st.lists(st.tuples(counts, counts), max_size=2))
    ]
    events += [Piece(reasoning=text) for text in draw(st.lists(_TEXT, max_size=3))]
    events += [
        Piece(content=text, logprobs=(_ENTRY,)) for text in draw(st.lists(_TEXT, max_size=3))
    ]
    if draw(st.booleans()):
        # Backends may send the end of one part and the beginning of the next in one Reply.
        events.append(Piece(content=draw(_TEXT), reasoning=draw(_TEXT)))
    for index in range(draw(st.integers(0, 3))):
        events += _call(index, draw(st.sampled_from([["{}"], ['{"a"', ":1", "}"], ['{"b": "c"}']])))
    prompt = draw(st.integers(1, 50))
    completion = draw(st.integers(0, 9))
    usage = Usage(prompt, completion, draw(st.integers(0, prompt)), draw(st.integers(0, 3)))
    if draw(st.booleans()):
        return [*events, Done("length", usage)]
    return [*events, Done("stop", usage, draw(st.sampled_from((None, "END", "other"))))]
