"""Text that waits for its delivery grows, and nothing of it is lost or delivered twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend.engine.events import Finished, GrowingText, TextDelta, TokenLogprob
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.output import Output
from backend.engine.request import GenerationRequest, RawPrompt
from backend.engine.token_text import ByteStream
from common.stop_strings import StopMatcher

TOKENS = [b"a", "é".encode(), b"st", b"op", b""]


@given(st.lists(st.tuples(st.integers(0, len(TOKENS) - 1), st.booleans()), min_size=1))
def test_text_grows_until_it_is_delivered(steps: list[tuple[int, bool]]) -> None:
    request = GenerationRequest("1", RawPrompt(""), logprobs=0, stop=("stop",))
    sequence = ExecutorSequence(number=1, request=request, prompt=[1, 2, 3], limit=len(steps))
    output = Output(
        sequence, ByteStream(TOKENS.__getitem__, strip_first_space=False), StopMatcher(request.stop)
    )
    output.started(2, 0.0)
    delivered: list[TextDelta] = []
    waiting: list[GrowingText] = []
    finished: Finished | None = None
    taken = 0
    for token, delivers in steps:
        taken += 1
        for one in output.take(token, TokenLogprob(token, -1.0)):
            if isinstance(one, GrowingText):
                waiting.append(one)
            elif isinstance(one, Finished):
                finished = one
        assert len(waiting) <= 1, "earlier text did not grow"
        if delivers:
            delivered += [text.close() for text in waiting]
            waiting.clear()
        if finished is not None:
            break
    delivered += [text.close() for text in waiting]
    assert finished is not None
    assert finished.usage.completion_tokens == taken
    whole = b"".join(TOKENS[token] for token, _ in steps[:taken]).decode()
    assert "".join(text.text for text in delivered) == whole.partition("stop")[0]
    pieces = [piece for text in delivered for piece in text.pieces]
    assert all(text for text, _ in pieces)
    assert [count for _, count in pieces] == sorted({count for _, count in pieces})
    logprobs = [one.token for text in delivered for one in text.logprobs]
    assert logprobs == [token for token, _ in steps[: len(logprobs)]]
    assert {text.usage.cached_tokens for text in delivered} <= {2}
    assert [text.usage.completion_tokens for text in delivered] == sorted(
        text.usage.completion_tokens for text in delivered
    )
