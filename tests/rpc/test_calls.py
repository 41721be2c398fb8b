"""Each RPC over a real socket: requests reach the engine, and replies have the documented form."""

from __future__ import annotations

import json
import threading
from typing import Any

import grpc
import pytest

from backend.engine.engine_state import DraftReport, EngineState, ExpertCounts
from tests.rpc.client import failure_of, raw_call
from tests.rpc.conftest import WAIT, Running
from tests.rpc.fake_engine import FakeEngine, Script
from tests.rpc.requests_of_hosts import model_options, predict_options
from wire import backend_pb2 as pb
from wire.backend_pb2_grpc import BackendStub


def test_health_is_exactly_ok(stub: BackendStub) -> None:
    assert stub.Health(pb.HealthMessage()).message == b"OK"


def test_a_unary_answer_has_the_text_twice_and_the_totals(stub: BackendStub) -> None:
    reply = stub.Predict(predict_options())
    assert reply == pb.Reply(
        message=b"Hello",
        chat_deltas=[pb.ChatDelta(content="Hello")],
        tokens=2,
        prompt_tokens=7,
        timing_prompt_processing=1.5,
        timing_token_generation=4.0,
    )


def test_a_stream_has_running_totals_and_ends_with_a_reply_of_totals_alone(
    stub: BackendStub,
) -> None:
    *pieces, last = stub.PredictStream(predict_options())
    assert [piece.message for piece in pieces] == [b"Hel", b"lo"]
    assert [piece.chat_deltas[0].content for piece in pieces] == ["Hel", "lo"]
    assert [piece.tokens for piece in pieces] == [1, 2]
    assert {piece.prompt_tokens for piece in pieces} == {7}
    assert last == pb.Reply(
        tokens=2, prompt_tokens=7, timing_prompt_processing=1.5, timing_token_generation=4.0
    )


@pytest.mark.parametrize("pieces", [[], ["\N{GRINNING FACE}"], ["漢", "字"]])
def test_stream_and_unary_give_the_same_text(
    stub: BackendStub, engine: FakeEngine, pieces: list[str]
) -> None:
    engine.script = Script(pieces)
    streamed = b"".join(reply.message for reply in stub.PredictStream(predict_options()))
    assert streamed == stub.Predict(predict_options()).message == "".join(pieces).encode()


THINKING = ["<think>\nHm", "m.\n</th", "ink>\n\nLet me look.\n<tool_", "call>\n"]
CALLING = ['{"name": "clock", "argu', 'ments": {"zone": "UTC"}}\n</tool_call>']
CHAT = predict_options(
    Prompt="",
    Messages=[pb.Message(role="user", content="What time is it?")],
    Tools='[{"type": "function", "function": {"name": "clock"}}]',
)


def test_reasoning_and_calls_are_sent_as_deltas_and_content_in_both_fields(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script([*THINKING, *CALLING])
    *pieces, last = stub.PredictStream(CHAT)
    deltas = [delta for piece in pieces for delta in piece.chat_deltas]
    assert "".join(delta.reasoning_content for delta in deltas) == "Hmm."
    assert "".join(delta.content for delta in deltas) == "Let me look."
    assert b"".join(piece.message for piece in pieces) == b"Let me look."
    assert all(
        piece.message.decode() == "".join(delta.content for delta in piece.chat_deltas)
        for piece in pieces
    )
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.name for call in calls if call.name] == ["clock"]
    assert json.loads("".join(call.arguments for call in calls)) == {"zone": "UTC"}
    assert {call.index for call in calls} == {0}
    assert (last.message, len(last.chat_deltas)) == (b"", 0)


def test_arguments_are_streamed_while_they_are_generated(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script(
        [*THINKING, '{"name": "clock", "arguments": {"zone": "U', "T", 'C", "n": 1', "2}}"]
    )
    calls = [
        call
        for piece in stub.PredictStream(CHAT)
        for delta in piece.chat_deltas
        for call in delta.tool_calls
    ]
    pieces = [call.arguments for call in calls if call.arguments]
    assert pieces == ['{"zone": "U', "T", 'C", "n": ', "12}"]


def test_a_cut_call_is_partial_in_a_stream_and_dropped_from_a_whole_answer(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script(
        [*THINKING, '{"name": "clock", "arguments": {"zone": "U'], reason="length"
    )
    deltas = [delta for piece in stub.PredictStream(CHAT) for delta in piece.chat_deltas]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.name for call in calls if call.name] == ["clock"]
    assert "".join(call.arguments for call in calls) == '{"zone": "U'
    assert "".join(delta.content for delta in deltas) == "Let me look."
    (whole,) = stub.Predict(CHAT).chat_deltas
    assert (whole.content, len(whole.tool_calls)) == ("Let me look.", 0)


def test_a_call_that_the_model_did_not_finish_is_text_in_a_unary_answer(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script([*THINKING, begun := '{"name": "clock", "arguments": {"zone": "U'])
    deltas = [delta for piece in stub.PredictStream(CHAT) for delta in piece.chat_deltas]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert "".join(call.arguments for call in calls) == '{"zone": "U'
    (whole,) = stub.Predict(CHAT).chat_deltas
    assert whole.content == "".join(delta.content for delta in deltas)
    assert whole.content.endswith(begun)
    assert not whole.tool_calls


def test_a_unary_chat_answer_equals_the_joined_stream(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script([*THINKING, *CALLING])
    reply = stub.Predict(CHAT)
    assert reply.message == b"Let me look."
    (delta,) = reply.chat_deltas
    assert (delta.content, delta.reasoning_content) == ("Let me look.", "Hmm.")
    (call,) = delta.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("clock", {"zone": "UTC"})
    assert call.id


def test_a_raw_prompt_is_continued_without_parsing(stub: BackendStub, engine: FakeEngine) -> None:
    engine.script = Script(THINKING)
    assert stub.Predict(predict_options()).message.decode() == "".join(THINKING)


def test_a_replacement_character_is_sent_only_in_deltas(
    stub: BackendStub, engine: FakeEngine
) -> None:
    """LocalAI stops reading a stream at one in `message`; the gateway reads the deltas."""
    engine.script = Script(["a\ufffdb"])
    for reply in (stub.Predict(predict_options()), next(stub.PredictStream(predict_options()))):
        assert reply.message == b"a?b"
        assert reply.chat_deltas[0].content == "a\ufffdb"


def test_load_reaches_the_engine_and_reports_what_was_loaded(
    stub: BackendStub, engine: FakeEngine
) -> None:
    result = stub.LoadModel(model_options())
    assert result.success
    assert result.message == "loaded tiny (qwen3, context 2048 tokens)"
    assert engine.loads[0].model == "mlx-community/tiny"


def test_free_succeeds_with_and_without_a_model(stub: BackendStub) -> None:
    first, second = stub.Free(pb.HealthMessage()), stub.Free(pb.HealthMessage())
    assert first.success
    assert second.success
    assert first.message != second.message


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Predict", predict_options()),
        ("TokenizeString", predict_options()),
        ("Detokenize", pb.DetokenizeRequest(tokens=[1])),
        ("ModelMetadata", pb.ModelOptions()),
        ("Predict", pb.PredictOptions(Temperature=-1)),
    ],
)
def test_without_a_model_that_is_reported_before_any_other_error(
    stub: BackendStub, engine: FakeEngine, method: str, request_: object
) -> None:
    engine.served = None
    failure = failure_of(lambda: getattr(stub, method)(request_))
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "model not loaded" in failure.sentence


def test_tokenize_ignores_the_template_and_fills_both_fields(stub: BackendStub) -> None:
    reply = stub.TokenizeString(pb.PredictOptions(Prompt="hi", UseTokenizerTemplate=True))
    assert (reply.length, list(reply.tokens)) == (2, [104, 105])
    assert stub.TokenizeString(pb.PredictOptions()).length == 0
    chat = pb.PredictOptions(Messages=[pb.Message(role="user", content="hi")])
    failure = failure_of(lambda: stub.TokenizeString(chat))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "send it as Prompt" in failure.sentence


def test_detokenize(stub: BackendStub) -> None:
    assert stub.Detokenize(pb.DetokenizeRequest(tokens=[104, 105])).content == "hi"


@pytest.mark.parametrize(
    ("state", "reported"),
    [
        (EngineState.EMPTY, pb.StatusResponse.UNINITIALIZED),
        (EngineState.LOADING, pb.StatusResponse.BUSY),
        (EngineState.GENERATING, pb.StatusResponse.BUSY),
        (EngineState.READY, pb.StatusResponse.READY),
        (EngineState.FAILED, pb.StatusResponse.ERROR),
    ],
)
def test_status(stub: BackendStub, engine: FakeEngine, state: EngineState, reported: int) -> None:
    engine.state = state
    status = stub.Status(pb.HealthMessage())
    assert status.state == reported
    assert status.memory.total == 300
    assert dict(status.memory.breakdown) == {"weights": 200, "cache": 100}


def test_metrics_fit_into_the_integers_of_the_wire(stub: BackendStub) -> None:
    metrics = stub.GetMetrics(pb.MetricsRequest())
    assert metrics.tokens_generated == 2**31 - 1
    assert metrics.prompt_tokens_processed == 12
    assert metrics.tokens_per_second == pytest.approx(34.5)
    assert metrics.prompt_json_for_slot == ""


@pytest.mark.parametrize(
    ("method", "asked"), [("Status", pb.HealthMessage()), ("GetMetrics", pb.MetricsRequest())]
)
def test_metrics_report_drafting(
    stub: BackendStub, engine: FakeEngine, method: str, asked: Any
) -> None:
    def shown() -> dict[str, Any]:
        _, call = getattr(stub, method).with_call(asked)
        return {key: value for key, value in call.trailing_metadata() if "draft" in key}

    assert shown() == {}
    engine.drafting = DraftReport(4, 20, 15, 1.5, "prompt lookup, draft model")
    assert shown() == {
        "mlx-draft-width": "4",
        "mlx-draft-tokens": "20",
        "mlx-draft-accepted-tokens": "15",
        "mlx-draft-gain": "1.50",
        "mlx-drafters": "prompt lookup, draft model",
    }


@pytest.mark.parametrize(
    ("method", "asked"), [("Status", pb.HealthMessage()), ("GetMetrics", pb.MetricsRequest())]
)
def test_metrics_report_experts(
    stub: BackendStub, engine: FakeEngine, method: str, asked: Any
) -> None:
    engine.experts = ExpertCounts(12, 128, 48, 700, 90, 2**40, 1.2345678, 60, 2**30)
    _, call = getattr(stub, method).with_call(asked)
    shown = {key: value for key, value in call.trailing_metadata() if "expert" in key}
    assert shown == {
        "mlx-expert-slots": "12",
        "mlx-expert-hits": "700",
        "mlx-expert-misses": "90",
        "mlx-expert-ahead-hits": "60",
        "mlx-expert-read-bytes": "1099511627776",
        "mlx-expert-wasted-bytes": "1073741824",
        "mlx-expert-wait-seconds": "1.234568",  # one wait may take microseconds
    }


def test_status_reports_ranks_whatever_their_hosts_and_faults_are_called(
    stub: BackendStub, engine: FakeEngine
) -> None:
    """gRPC refuses trailers that are not printable ASCII, and with them the answer."""
    engine.ranks = ("lost: rank 1 (b\u00fccher) failed: RuntimeError: [ring] a\nb\x7f",)
    _, call = stub.Status.with_call(pb.HealthMessage())
    lines = [value for key, value in call.trailing_metadata() if key == "mlx-rank"]
    assert lines == ["lost: rank 1 (b?cher) failed: RuntimeError: [ring] a?b?"]


def test_metadata(stub: BackendStub) -> None:
    metadata = stub.ModelMetadata(pb.ModelOptions())
    assert metadata.supports_thinking
    assert metadata.rendered_template == "<rendered>"


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embedding", pb.PredictOptions(Embeddings="x")),
        ("Rerank", pb.RerankRequest(query="x", documents=["y"])),
        ("TokenClassify", pb.TokenClassifyRequest(text="x")),
    ],
)
def test_methods_that_the_loaded_model_does_not_support_say_so(
    stub: BackendStub, engine: FakeEngine, method: str, request_: object
) -> None:
    failure = failure_of(lambda: getattr(stub, method)(request_))
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert failure.sentence.startswith(f"{method} is not served")
    engine.served = None
    failure = failure_of(lambda: getattr(stub, method)(request_))
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION


def test_an_rpc_that_does_not_exist_here_is_unimplemented(running: Running) -> None:
    failure = failure_of(lambda: raw_call(running.channel, "/backend.Backend/TTS", b""))
    assert failure.code is grpc.StatusCode.UNIMPLEMENTED
    assert failure.sentence.startswith("TTS is not served: this backend runs models that")


def test_many_threads_with_a_connection_per_call_are_served(running: Running) -> None:
    faults: list[Exception] = []

    def calls() -> None:
        try:
            for _ in range(10):
                with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
                    stub = BackendStub(channel)
                    assert stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"
                    assert stub.Predict(predict_options(), timeout=WAIT).message == b"Hello"
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=calls) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert faults == []
    assert len(running.engine.requests) == 80


def test_a_stream_reports_prompt_progress_before_its_first_token(
    stub: BackendStub, engine: FakeEngine
) -> None:
    engine.script = Script(["Hi"], progress=[0, 4, 7])
    first, *more = stub.PredictStream(predict_options())
    reported = [json.loads(reply.logprobs)["progress"] for reply in (first, *more[:2])]
    assert reported == [{"total": 7, "cached": 0, "processed": done} for done in (0, 4, 7)]
    assert not any(reply.message or reply.chat_deltas for reply in (first, *more[:2]))
    assert more[2].message == b"Hi"
    assert stub.Predict(predict_options()).message == b"Hi"
