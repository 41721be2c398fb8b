"""The engine's public seam: everything that the servicer may ask, and nothing that touches MLX.

Importing this module is cheap; mlx and mlx-lm are imported by the engine thread on its first load.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from backend.engine import score_plan
from backend.engine.commands import Cancel, Encode, Free, Load, Stop, Submit
from backend.engine.embedding.encoding import Encoded, Encoding, Piece
from backend.engine.embedding.kind import ModelKind
from backend.engine.embedding.readers import Reader
from backend.engine.errors import (
    EngineError,
    EngineFailed,
    NotLoaded,
    Overloaded,
    ShuttingDown,
    WrongKind,
)
from backend.engine.events import Finished, TokenLogprob, Usage
from backend.engine.generation import Generation
from backend.engine.prompts import require_tellable
from backend.engine.request import ChatPrompt, Extras, GenerationRequest, TokenPrompt
from backend.engine.score_plan import ScoreRequest
from backend.engine.token_text import TextStream
from backend.engine.worker import Publication, Worker
from common.chat_format import ChatFormat
from common.options import shown

if TYPE_CHECKING:
    from backend.engine.constraints.constraint import Constraint
    from backend.engine.disk_cache.cache import StoredPrefix
    from backend.engine.load import Served
    from backend.engine.loading.adapters import AdapterRequest

_PROMPT_THREADS = 2
_SAVE_SECONDS_AT_FREE = 3.0  # the host waits 5 for the answer (contract 1.6.1)
_SAVE_SECONDS = 1.0  # for what is being written to disk when the process stops
_MOST_TEXT_CALLS = 64

Given = TypeVar("Given")
Answer = TypeVar("Answer")
Asked = TypeVar("Asked", bound=Reader)
Owner = TypeVar("Owner", Generation, Encoding)


class EngineState(Enum):
    """What the one model slot of this process is doing."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State plus memory figures in bytes, as MLX reports them."""

    state: EngineState
    total_bytes: int
    breakdown: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Totals since the process started, and the speed of the latest decode step."""

    running: int
    queued: int
    tokens_generated: int
    prompt_tokens_processed: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What LoadModel asked for, typed (`backend.rpc.load_options` builds it).

    model, model_file, model_path: the three references of contract 2.1, verbatim.
    context_size: tokens of prompt plus output; 0 means the model's own maximum.
    cache_type_key, cache_type_value: llama.cpp's names for the form of the KV cache.
    adapters: in the order in which they were named; they add up.
    draft_model: a smaller model that guesses ahead, as the host names it; empty means none.
    embeddings, reranking: what the model must be able to answer.
    most_images, most_audios, most_videos: of one request; 0: the default.
    settings: our settings by name (`backend.engine.settings`), already typed and checked.
    """

    model: str
    model_file: str = ""
    model_path: str = ""
    context_size: int = 0
    dtype: str = ""
    trust_remote_code: bool = False
    cache_type_key: str = ""
    cache_type_value: str = ""
    adapters: tuple[AdapterRequest, ...] = ()
    draft_model: str = ""
    embeddings: bool = False
    reranking: bool = False
    most_images: int = 0
    most_audios: int = 0
    most_videos: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the loaded model.

    vocabulary_size: width of its logits. token_bytes: what a token writes. new_text: a decoder of
    tokens; the argument says whether its text goes on from an earlier one. kind: what it answers.
    media: which of image and audio it takes; media_marker: where they go in a raw prompt.
    """

    name: str
    model_type: str
    context_size: int
    chat_template: str | None
    chat_format: ChatFormat
    rendered_template: str
    vocabulary_size: int
    token_bytes: Callable[[int], bytes]
    new_text: Callable[[bool], TextStream]
    defaults: Extras = field(default_factory=Extras)
    kind: ModelKind = ModelKind.TEXT
    media: frozenset[str] = frozenset()
    media_marker: str = ""


class Engine:
    """Owner of the engine thread. All methods are called from one asyncio loop."""

    def __init__(self) -> None:
        self._worker = Worker(self._deliver_threadsafe, self._fatal_threadsafe)
        self._prompts = ThreadPoolExecutor(_PROMPT_THREADS, thread_name_prefix="prompt")
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._text_calls = 0
        self._files = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._generations: dict[int, Generation | Encoding] = {}
        self._tickets = itertools.count(1)
        self._epochs = itertools.count(1)
        self._served: Served | None = None
        self._abandoned = threading.Event()
        self._loading = False
        self._stopping = False
        self._slot = asyncio.Lock()
        self._failure: asyncio.Future[str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the engine thread (cheap: no heavy import). Called on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._worker.start()

    @property
    def loaded(self) -> ModelFacts | None:
        """The loaded model, or None."""
        return self._served.facts if self._served is not None else None

    def require_model(self) -> ModelFacts:
        """The loaded model. Raises NotLoaded (also while a load is under way), ShuttingDown."""
        return self._require().facts

    def require_text_model(self, rpc: str) -> ModelFacts:
        """The loaded model, if it generates text. Raises WrongKind besides."""
        facts = self.require_model()
        if facts.kind is not ModelKind.TEXT:
            raise _wrong_kind(rpc, facts)
        return facts

    def reader(self, asked: type[Asked]) -> Asked:
        """What turns a request of that sort into rows for the loaded model. Raises WrongKind."""
        served = self._require()
        if not isinstance(served.reader, asked):
            raise _wrong_kind(asked.rpc, served.facts)
        return served.reader

    async def load(self, request: LoadRequest) -> ModelFacts:
        """Load a model; serialised. Raises ModelNotFound, ModelRejected, InvalidRequest.

        A failed load leaves a loaded model as it was. Cancelling the awaiting task cancels a
        download.
        """
        self._refuse_when_stopping()
        async with self._slot:
            self._refuse_when_stopping()
            abandoned = self._abandoned = threading.Event()
            self._loading = True
            loading = asyncio.ensure_future(self._load(request, abandoned))
            try:
                self._served = await asyncio.shield(loading)
            except asyncio.CancelledError:
                abandoned.set()
                # The engine thread may be past the point of no return: keep what it then holds.
                while not loading.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({loading})
                if not loading.cancelled() and loading.exception() is None:
                    self._served = loading.result()
                raise
            finally:
                self._loading = False
            return self._served.facts

    async def free(self) -> bool:
        """Cancel all generations, drop the model, release its memory. False: nothing loaded."""
        self._refuse_when_stopping()
        async with self._slot:
            served, self._served = self._served, None
            command = Free()
            self._worker.send(command)
            # The engine thread frees whether or not the caller stays to hear of it.
            await asyncio.shield(asyncio.wrap_future(command.done))
            if served is not None and served.disk is not None:
                await asyncio.to_thread(served.disk.close, _SAVE_SECONDS_AT_FREE)
            return served is not None

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request; returns at once. Raises NotLoaded, Overloaded, ShuttingDown."""
        self.require_text_model("Predict")
        return self._queue(
            Generation, lambda served, ticket: self._prepare(served, ticket, request)
        )

    async def encode(self, read: Callable[[], list[Piece]]) -> Encoded:
        """The model's output for the rows that `read` gives on a prompt thread.

        A cancelled caller frees the engine. Raises what `read` raises, Overloaded, NotLoaded.
        """
        encoding = self._queue(
            Encoding, lambda served, ticket: self._prepare_encoding(served, ticket, read)
        )
        return await encoding.result()

    async def score(self, request: ScoreRequest) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Per candidate, its tokens with their natural log-probabilities after the prompt.

        A cancelled caller frees the engine. Raises what `submit` and its generation raise.
        """
        self.require_text_model("Score")
        generation = self._queue(
            Generation, lambda served, ticket: self._prepare_score(served, ticket, request)
        )
        async with generation:
            async for event in generation:
                if isinstance(event, Finished):
                    return event.scores
        raise AssertionError("a generation ends with Finished, or raises")

    def _queue(
        self,
        owner_of: Callable[[Callable[[], None]], Owner],
        prepare: Callable[[Served, int], None],
    ) -> Owner:
        served = self._require()
        if len(self._generations) >= served.capacity:
            raise Overloaded(
                f"the queue is full: {len(self._generations)} requests are running or waiting;"
                " try again later, or load the model with a larger max_queue"
            )
        ticket = next(self._tickets)
        owner = owner_of(lambda: self._cancel(ticket))
        self._generations[ticket] = owner
        self._prompts.submit(self._guarded, prepare, served, ticket)
        return owner

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of the text; special-token text is parsed, none is added."""
        builder = self._require().prompts
        return await self._in_text_thread(builder.tokenize, text)

    async def detokenize(self, tokens: list[int]) -> str:
        """Text of the ids. Raises InvalidRequest for an id outside the vocabulary."""
        builder = self._require().prompts
        return await self._in_text_thread(builder.detokenize, tokens)

    def status(self) -> EngineStatus:
        """State and memory. total: what MLX holds, in use or kept for reuse."""
        breakdown: dict[str, int] = {}
        mx: Any = sys.modules.get("mlx.core")
        if hasattr(mx, "get_active_memory") and hasattr(mx, "get_cache_memory"):
            # Counters of the allocator: readable on any thread, unlike arrays.
            breakdown = {"mlx_active": mx.get_active_memory(), "mlx_cache": mx.get_cache_memory()}
        total = sum(breakdown.values())
        if self._served is not None:
            gauges = self._worker.gauges
            breakdown |= {
                "weights": self._served.weights_bytes,
                "kv_cache": gauges.row_bytes,
                "prompt_cache": gauges.prefix_bytes,
            }
            if self._served.facts.media:
                breakdown["media_features"] = gauges.feature_bytes
        return EngineStatus(self._state(), total, breakdown)

    def metrics(self) -> EngineMetrics:
        """Running totals; queued requests include those whose prompt is being tokenised."""
        gauges = self._worker.gauges
        return EngineMetrics(
            running=gauges.running,
            queued=max(len(self._generations) - gauges.running, 0),
            tokens_generated=gauges.tokens_generated,
            prompt_tokens_processed=gauges.prompt_tokens_processed,
            tokens_per_second=gauges.tokens_per_second,
        )

    async def stop(self, grace: float) -> None:
        """Refuse new work, cancel the running, end the thread; returns within `grace` seconds."""
        self._stopping = True
        self._abandoned.set()
        self._worker.send(Stop())
        for threads in (self._prompts, self._texts, self._files):
            threads.shutdown(wait=False, cancel_futures=True)
        for ticket in list(self._generations):
            self._finish(ticket, ShuttingDown())
        started = time.monotonic()
        await asyncio.to_thread(self._worker.join, grace)
        if self._served is not None and self._served.disk is not None:
            left = grace - (time.monotonic() - started)
            await asyncio.to_thread(self._served.disk.close, min(max(left, 0.0), _SAVE_SECONDS))

    async def failed(self) -> str:
        """Wait until the engine cannot go on (never, in a healthy process); returns the cause."""
        assert self._failure is not None, "start() comes first"
        return await asyncio.shield(self._failure)

    async def _load(self, request: LoadRequest, abandoned: threading.Event) -> Served:
        from backend.engine.load import find, read

        assert self._loop is not None
        found = await self._loop.run_in_executor(self._files, find, request, abandoned)
        self._refuse_when_stopping()
        epoch = next(self._epochs)
        command = Load(epoch, lambda: read(found, request, epoch, abandoned), abandoned)
        self._worker.send(command)
        served: Served = await asyncio.wrap_future(command.done)
        return served

    def _require(self) -> Served:
        self._refuse_when_stopping()
        if self._loading:
            raise NotLoaded("a load is under way, try again when it is done")
        if self._served is None:
            raise NotLoaded()
        return self._served

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise ShuttingDown()

    def _state(self) -> EngineState:
        if self._failure is not None and self._failure.done():
            return EngineState.FAILED
        if self._loading:
            return EngineState.LOADING
        if self._served is None:
            return EngineState.EMPTY
        return EngineState.GENERATING if self._generations else EngineState.READY

    async def _in_text_thread(self, work: Callable[[Given], Answer], given: Given) -> Answer:
        """On a thread of its own: callers who left must not hold up the prompts."""
        assert self._loop is not None
        if self._text_calls >= _MOST_TEXT_CALLS:
            raise Overloaded(
                f"{self._text_calls} texts are being tokenised or waiting: try again later"
            )
        self._text_calls += 1
        future = self._loop.run_in_executor(self._texts, work, given)
        future.add_done_callback(self._text_done)
        return await asyncio.shield(future)

    def _text_done(self, future: asyncio.Future[Any]) -> None:
        self._text_calls -= 1
        if not future.cancelled():
            future.exception()  # its caller may have left

    def _guarded(self, prepare: Callable[[Served, int], None], served: Served, ticket: int) -> None:
        """On a prompt thread: tokenise, and hand the row to the engine thread."""
        if ticket not in self._generations:
            return
        try:
            prepare(served, ticket)
        except EngineError as refusal:
            self._deliver_threadsafe([(ticket, refusal)])
        except BaseException as fault:  # a panic of the tokenizer's Rust is no Exception
            self._deliver_threadsafe([(ticket, _prompt_fault(fault))])
        else:
            if ticket not in self._generations:
                # Cancelled meanwhile: that command may have overtaken the row's.
                self._worker.send(Cancel(ticket))

    def _prepare(self, served: Served, ticket: int, request: GenerationRequest) -> None:
        prompt = served.prompts.build(request.prompt, request.attachments)
        request = replace(request, attachments=None)
        if request.prompt_logprobs is not None:
            require_tellable(len(prompt.tokens), request.prompt_logprobs)
        constraint = _constraint(served, request, prompt.tail)
        stored = None
        if prompt.media is None:
            stored = self._find_on_disk(served, request, prompt.tokens)
        if not isinstance(generation := self._generations.get(ticket), Generation):
            return
        generation.prompt_tail = prompt.tail
        room = served.facts.context_size - len(prompt.tokens)
        limit = min(request.max_tokens or served.default_max_tokens or room, room)
        self._worker.send(
            Submit(
                served.epoch,
                ticket,
                request,
                prompt.tokens,
                limit,
                constraint,
                stored,
                media=prompt.media,
            )
        )

    def _prepare_score(self, served: Served, ticket: int, request: ScoreRequest) -> None:
        scored = score_plan.plan(
            request,
            served.prompts.encode_open,
            served.facts.context_size,
            wanted=lambda: ticket in self._generations,
        )
        if ticket not in self._generations:
            return
        if not scored.longest:
            nothing: tuple[tuple[TokenLogprob, ...], ...] = ((),) * len(request.candidates)
            self._deliver_threadsafe([(ticket, Finished("stop", Usage(), scores=nothing))])
            return
        row = GenerationRequest(request.request_id, TokenPrompt(tuple(scored.prefix)))
        self._worker.send(
            Submit(served.epoch, ticket, row, scored.prefix, scored.longest, plan=scored)
        )

    def _prepare_encoding(
        self, served: Served, ticket: int, read: Callable[[], list[Piece]]
    ) -> None:
        pieces = read()
        if pieces:
            self._worker.send(Encode(served.epoch, ticket, pieces))
        else:
            self._deliver_threadsafe([(ticket, Encoded(()))])

    def _find_on_disk(
        self, served: Served, request: GenerationRequest, prompt: list[int]
    ) -> StoredPrefix | None:
        if served.disk is None or request.prompt_logprobs is not None:
            return None
        return served.disk.find(prompt, path=request.disk.path, held=self._worker.held(prompt))

    def _cancel(self, ticket: int) -> None:
        if self._generations.pop(ticket, None) is not None:
            self._worker.send(Cancel(ticket))

    def _deliver_threadsafe(self, publications: list[Publication]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, publications)

    def _deliver(self, publications: list[Publication]) -> None:
        for ticket, what in publications:
            owner = self._generations.get(ticket)
            if isinstance(owner, Encoding):
                owner.push(what)
            elif owner is not None:
                assert not isinstance(what, Encoded), "a generation is told of text"
                owner.push(what)
            if owner is not None and owner.over:
                del self._generations[ticket]

    def _finish(self, ticket: int, error: EngineError) -> None:
        self._deliver([(ticket, error)])

    def _fatal_threadsafe(self, cause: str) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, cause)

    def _fail(self, cause: str) -> None:
        for ticket in list(self._generations):
            self._finish(ticket, EngineFailed("the engine failed; the backend is going down"))
        self._served = None
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(cause)


def _constraint(served: Served, request: GenerationRequest, tail: str) -> Constraint | None:
    """Compile what constrains the answer. Raises InvalidRequest."""
    if request.constraint is None:
        return None
    assert served.constraints is not None, "only a model that generates gets this far"
    arguments = getattr(request.prompt, "template_arguments", {})
    return served.constraints.compile(
        request.constraint,
        prompt_tail=tail,
        answers_messages=isinstance(request.prompt, ChatPrompt),
        thinking=arguments.get("enable_thinking"),
    )


def _wrong_kind(rpc: str, facts: ModelFacts) -> WrongKind:
    return WrongKind(
        f"{rpc} is not served: the loaded model {shown(facts.name)} {facts.kind.words}"
    )


def _prompt_fault(fault: BaseException) -> EngineFailed:
    return EngineFailed(f"the prompt could not be prepared ({type(fault).__name__})")
