"""The main job on a real model: load, answer, stream, tokenise, free, load again, shut down."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.acceptance.backend import TINY_TEXT, WAIT, Backend, chat, text_of, threads_of
from tests.long import TEST_LONG
from tests.polling import until
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

STORY = "Tell me a long story."


def test_health_is_ok_before_and_after_the_model(bare: Backend) -> None:
    assert bare.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"
    assert bare.load().success
    assert bare.stub.Health(pb.HealthMessage(), timeout=WAIT).message == b"OK"


def test_stream_and_unary_call_give_the_same_well_formed_answer(served: Backend) -> None:
    for fields in ({}, {"Temperature": 0.8, "Seed": 7}, {"Temperature": 1.0, "TopP": 0.9}):
        request = chat(STORY, Tokens=60, **fields)
        replies = list(served.stub.PredictStream(request, timeout=WAIT))
        whole = served.stub.Predict(request, timeout=WAIT)
        assert text_of(iter(replies)) == whole.message.decode() != ""
        for reply in replies[:-1]:
            assert reply.message.decode() == "".join(d.content for d in reply.chat_deltas)
        last = replies[-1]
        assert (last.message, len(last.chat_deltas)) == (b"", 0)
        assert (last.tokens, last.prompt_tokens) == (whole.tokens, whole.prompt_tokens)
        assert 0 < last.tokens <= 60
        assert last.timing_prompt_processing > 0
        assert last.timing_token_generation > 0
        assert [reply.tokens for reply in replies] == sorted(reply.tokens for reply in replies)
        assert whole.chat_deltas[0].content == whole.message.decode()


def test_the_model_answers(served: Backend) -> None:
    reply = served.stub.Predict(chat("What is the capital of France?"), timeout=WAIT)
    assert "Paris" in reply.message.decode()


def test_eight_concurrent_clients_each_get_their_own_answer(served: Backend) -> None:
    names = ["Kim", "Ana", "Tom", "Eva", "Max", "Ida", "Leo", "Zoe"]

    def ask(name: str) -> str:
        with served.connect() as channel:
            stub = backend_pb2_grpc.BackendStub(channel)
            request = chat(f"My name is {name}.", "Nice to meet you.", "What is my name?")
            return text_of(stub.PredictStream(request, timeout=WAIT))

    alone = {name: ask(name) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        together = dict(zip(names, pool.map(ask, names), strict=True))
    assert together == alone
    assert sum(name in answer for name, answer in alone.items()) >= 6


def test_characters_are_never_split(served: Backend) -> None:
    replies = list(served.stub.PredictStream(chat("Say hello in Chinese."), timeout=WAIT))
    text = "".join(reply.message.decode() for reply in replies)
    assert any("\u4e00" <= character <= "\u9fff" for character in text)
    assert "\ufffd" not in text


def test_stop_strings_over_token_boundaries_are_never_sent(served: Backend) -> None:
    reply = served.stub.Predict(chat(STORY, Tokens=120), timeout=WAIT)
    whole = reply.message.decode()
    for stop in ("\n\n", whole[37:60], "never there", whole[90:91]):
        request = chat(STORY, Tokens=120, StopPrompts=["", stop])
        replies = list(served.stub.PredictStream(request, timeout=WAIT))
        assert text_of(iter(replies)) == whole.partition(stop)[0]
        unary = served.stub.Predict(request, timeout=WAIT)
        assert unary.message.decode() == whole.partition(stop)[0]
        # Another server went on generating after the stop string.
        assert (unary.tokens < reply.tokens) == (stop in whole)


def test_tokens_counts_exactly_what_was_generated(served: Backend) -> None:
    for limit in (1, 2, 9):
        reply = served.stub.Predict(chat(STORY, Tokens=limit), timeout=WAIT)
        assert reply.tokens == limit
    natural = served.stub.Predict(chat("Count to 5."), timeout=WAIT)
    again = served.stub.Predict(chat("Count to 5.", Tokens=natural.tokens), timeout=WAIT)
    assert (again.message, again.tokens) == (natural.message, natural.tokens)


def test_an_answer_without_a_limit_ends_at_the_context(bare: Backend) -> None:
    bare.load(ContextSize=128)
    for tokens in (0, -1):
        request = chat(STORY, Tokens=tokens, IgnoreEOS=True)
        reply = bare.stub.Predict(request, timeout=WAIT)
        assert reply.prompt_tokens + reply.tokens == 128


def test_tokens_and_text_survive_a_round_trip(served: Backend) -> None:
    for text in ("Hello there", "héllo 你好 😀\n\n  x", "<|im_start|>user\nhi<|im_end|>"):
        tokens = served.stub.TokenizeString(pb.PredictOptions(Prompt=text), timeout=WAIT)
        assert tokens.length == len(tokens.tokens) > 0
        back = served.stub.Detokenize(pb.DetokenizeRequest(tokens=tokens.tokens), timeout=WAIT)
        assert back.content == text


def test_prompt_tokens_are_counted_in_full_when_most_are_cached(served: Backend) -> None:
    """Another server counted only the tokens that it computed."""
    request = chat("Count to 7. " * 20, Tokens=3)
    first = served.stub.Predict(request, timeout=WAIT)
    second, call = served.stub.Predict.with_call(request, timeout=WAIT)
    assert first.prompt_tokens == second.prompt_tokens
    assert first.message == second.message
    trailing = dict(call.trailing_metadata())
    assert trailing["mlx-cached-tokens"] == str(first.prompt_tokens - 1)


def test_free_and_load_again_release_the_memory(bare: Backend) -> None:
    bare.load()
    bare.stub.Predict(chat("Count to 30."), timeout=WAIT)
    loaded = bare.memory()
    for _ in range(3):
        assert bare.stub.Free(pb.HealthMessage(), timeout=WAIT).success
        assert bare.memory() < loaded / 50
        with pytest.raises(grpc.RpcError) as refused:
            bare.stub.Predict(chat("Hi"), timeout=WAIT)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        bare.load()
        bare.stub.Predict(chat("Count to 30."), timeout=WAIT)
        assert bare.memory() <= loaded * 1.05
    for _ in range(3):
        bare.load()
        assert bare.memory() <= loaded


def test_loads_of_two_models_leak_nothing(bare: Backend) -> None:
    process = bare.process()

    def load_and_free(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            for model in (TINY_TEXT, TINY_TEXT.parent / "tiny_vision"):
                bare.load(model)
                bare.stub.Free(pb.HealthMessage(), timeout=WAIT)
        return bare.memory(), threads_of(process), process.num_fds()

    settled = load_and_free(15 if TEST_LONG else 8)
    resident = process.memory_info().rss
    assert load_and_free(35 if TEST_LONG else 8) == settled
    assert process.memory_info().rss <= resident + 3 * 2**20


def test_a_failed_load_leaves_the_loaded_model_unchanged(bare: Backend) -> None:
    bare.load()
    with pytest.raises(grpc.RpcError) as refused:
        bare.load(TINY_TEXT.parent / "no_such_model")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert bare.stub.Predict(chat("Count to 5."), timeout=WAIT).message


def test_a_stream_continues_while_another_model_is_loaded(bare: Backend) -> None:
    vision = TINY_TEXT.parent / "tiny_vision"
    bare.load(vision)
    bare.load(ContextSize=100_000)
    stream = bare.stub.PredictStream(chat(STORY, IgnoreEOS=True), timeout=WAIT)
    next(stream)
    lengths: list[int] = []
    with ThreadPoolExecutor() as reader:
        reading = reader.submit(lambda: lengths.extend(len(reply.message) for reply in stream))
        before = len(lengths)
        bare.load(vision, Options=["load_trial:true"])  # as long a load as there is
        with pytest.raises(grpc.RpcError) as ended:
            reading.result(WAIT)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    assert sum(lengths[before:]) > 40


def test_sigterm_during_streams_ends_them_and_the_process(fresh: Backend) -> None:
    fresh.load()
    streams = [
        fresh.stub.PredictStream(chat(STORY, IgnoreEOS=True), timeout=WAIT) for _ in range(4)
    ]
    for stream in streams:
        next(stream)
    fresh.child.send_signal(signal.SIGTERM)
    for stream in streams:
        with pytest.raises(grpc.RpcError):
            text_of(stream)
    assert fresh.child.wait(WAIT) == 0


def test_metrics_and_metadata_describe_the_model(served: Backend) -> None:
    until(served.idle)  # an earlier test may have cancelled a request
    before = served.stub.GetMetrics(pb.MetricsRequest(), timeout=WAIT).tokens_generated
    reply = served.stub.Predict(chat("Count to 9."), timeout=WAIT)
    until(served.idle)
    after = served.stub.GetMetrics(pb.MetricsRequest(), timeout=WAIT).tokens_generated
    assert after - before == reply.tokens
    metadata = served.stub.ModelMetadata(pb.ModelOptions(), timeout=WAIT)
    assert metadata.supports_thinking
    assert "Hello" in metadata.rendered_template
