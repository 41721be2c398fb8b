"""An answer as blocks: one begins, grows and ends before the next, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given

from gateway.blocks import Blocks, Step
from gateway.calls import Done, Event, Piece, ToolCallPiece, Usage
from tests.gateway.generated_answers import answers


def steps_of(events: list[Event], custom: tuple[str, ...] = ()) -> tuple[list[Step], Blocks]:
    blocks = Blocks(custom)
    return [step for event in events for step in blocks.take(event)], blocks


@given(answers())
def test_each_block_begins_and_ends_before_the_next(events: list[Event]) -> None:
    steps, blocks = steps_of(events)
    verbs = [(step.block.place, step.verb) for step in steps if step.verb != "grow"]
    assert verbs == [(block.place, verb) for block in blocks.all for verb in ("begin", "end")]
    for block in blocks.all:
        assert block.text == "".join(step.text for step in steps if step.block is block)
    pieces = [event for event in events if isinstance(event, Piece)]
    assert blocks.text_of("text") == "".join(piece.content for piece in pieces)
    assert blocks.text_of("reasoning") == "".join(piece.reasoning for piece in pieces)
    parts = [part for piece in pieces for part in piece.tool_calls]
    assert [block.call.id for block in blocks.calls] == [part.id for part in parts if part.id]


@pytest.mark.parametrize(
    ("arguments", "reason", "text", "whole"),
    [
        ('{"input": "a\\nb"}', "stop", "a\nb", True),
        ('{"input": "a', "length", "a", False),
        ('{"other": 1}', "stop", '{"other": 1}', True),
        ("plain text", "stop", "plain text", False),
        ("plain te", "length", "", False),
    ],
)
def test_a_custom_call_has_its_text_in_any_split(
    arguments: str, reason: str, text: str, whole: bool
) -> None:
    for cut in range(len(arguments)):
        parts = [
            ToolCallPiece(0, "c", "edit", arguments[:cut]),
            ToolCallPiece(0, arguments=arguments[cut:]),
        ]
        end = Done("length" if reason == "length" else "stop", Usage())
        _, blocks = steps_of([*(Piece(tool_calls=(part,)) for part in parts), end], ("edit",))
        (block,) = blocks.all
        assert (block.text, block.whole) == (text, whole)


def test_a_limit_within_a_call_leaves_it_incomplete_and_its_text_as_sent() -> None:
    call = Piece(tool_calls=(ToolCallPiece(0, "c", "look", '{"a": '),))
    steps, blocks = steps_of([call, Done("length", Usage())])
    assert [step.text for step in steps] == ['{"a": ', ""]
    assert blocks.calls == []
