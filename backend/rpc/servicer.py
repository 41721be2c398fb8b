"""The RPCs: each converts the request, calls the engine, and converts the answer.

Exceptions pass through; `backend.rpc.interceptors` turns them into statuses. Whether a model is
loaded is checked before the request is validated. A cancelled call raises inside `async with`,
which cancels the generation in the engine immediately, queued or running.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from backend.engine.engine import Engine
from backend.engine.engine_state import EngineState
from backend.engine.errors import EngineError
from backend.engine.events import Finished, Progress, Usage
from backend.engine.load_request import LoadRequest
from backend.engine.served_model import ServedModel
from backend.rpc import logs, replies
from backend.rpc.answer import Answer
from backend.rpc.call_log import note
from backend.rpc.checks import require_most
from backend.rpc.fields import TOKENIZE_STRING, require_neutral
from backend.rpc.last_load import LastLoad
from backend.rpc.load_options import load_request
from backend.rpc.text_readings import Context, TextReadings
from backend.rpc.transcription import transcribe
from common.chat_events import ChatEvent, message_of
from wire import backend_pb2 as pb

LARGEST_TEXT = 1 << 20
MOST_IDS = 1 << 20
_INT32_MAX = 2**31 - 1

_STATES = {
    EngineState.EMPTY: pb.StatusResponse.UNINITIALIZED,
    EngineState.LOADING: pb.StatusResponse.BUSY,
    EngineState.GENERATING: pb.StatusResponse.BUSY,
    EngineState.READY: pb.StatusResponse.READY,
    EngineState.FAILED: pb.StatusResponse.ERROR,
}


class Servicer(TextReadings):
    """All RPCs of the backend."""

    def __init__(self, engine: Engine, last_load: LastLoad) -> None:
        super().__init__(engine)
        self._loading = asyncio.Lock()
        self._last_load = last_load

    async def Health(self, _: pb.HealthMessage, _context: Context) -> pb.Reply:
        return pb.Reply(message=b"OK")

    async def LoadModel(self, request: pb.ModelOptions, context: Context) -> pb.Result:
        note(model=request.Model)
        wanted, warnings = load_request(request)
        for warning in warnings:
            logs.warning("load_option", model=request.Model, warning=warning)
        logs.info("load", model=request.Model)
        async with self._loading:
            before = self._engine.loaded
            try:
                served = await self._load(request.Model, wanted)
            finally:
                if (after := self._engine.loaded) is None:
                    self._last_load.forget()  # the load dropped the old model and failed
                elif after is not before:
                    self._last_load.remember(request)
        note(type=served.model_type, context=served.context_size)
        size, why = str(served.context_size), served.context_reason
        reason = ((replies.CONTEXT_REASON, why),) if why else ()
        context.set_trailing_metadata(((replies.CONTEXT_SIZE, size), *reason))
        words = f"loaded {served.name} ({served.model_type}, context {size} tokens)"
        if served.division:
            words += f" on {served.division}"
        if before is not None and before.epoch == served.epoch:
            words = (
                f"requests to {served.name} may choose the adapters {', '.join(served.adapters)}"
            )
            words = words if served.adapters else f"{served.name} has no adapters to choose from"
        return pb.Result(success=True, message=words)

    async def _load(self, name: str, wanted: LoadRequest) -> ServedModel:
        """Load, and remember the name, even if the caller disconnects just before the load ends."""
        before = self._engine.loaded
        try:
            return await self._engine.load(wanted)
        finally:
            after = self._engine.loaded
            if after is not None and after is not before:
                self._last_load.name = name

    async def load_again(self) -> None:
        """Load the model that the previous process had loaded; a failure is logged."""
        if (request := self._last_load.request()) is None:
            return
        try:
            async with self._loading:
                await self._load(request.Model, load_request(request)[0])
            logs.info("loaded_again", model=request.Model)
        except EngineError as error:
            logs.error("loaded_again", model=request.Model, failed=error)

    async def Free(self, _: pb.HealthMessage, _context: Context) -> pb.Result:
        async with self._loading:
            self._last_load.forget()
            freed = await self._engine.free()
        words = "the model is unloaded" if freed else "there was no model to unload"
        return pb.Result(success=True, message=words)

    async def Predict(self, request: pb.PredictOptions, context: Context) -> pb.Reply:
        parts: list[ChatEvent] = []
        usage, logprobs = Usage(), b""
        served = self._engine.require_text_model("Predict")
        answer = Answer(self._engine, request, served)
        del request
        async with aclosing(answer.events()) as events:
            async for event, added in events:
                parts += added
                usage = event.usage
                if isinstance(event, Finished):
                    logprobs = await answer.last_logprobs(event)
                    context.set_trailing_metadata(replies.trailers(event, answer.reasoning_tokens))
        return replies.unary(message_of(parts), usage, logprobs)

    async def PredictStream(self, request: pb.PredictOptions, context: Context) -> None:
        served = self._engine.require_text_model("Predict")
        answer = Answer(self._engine, request, served, partial_calls=True)
        del request
        async with aclosing(answer.events()) as events:
            async for event, parts in events:
                if isinstance(event, Progress):
                    await context.write(replies.progress(event))
                for part in parts:
                    logprobs = answer.piece_logprobs()
                    await context.write(replies.piece(part, event.usage, logprobs))
                if isinstance(event, Finished):
                    logprobs = await answer.last_logprobs(event)
                    await context.write(replies.last(event.usage, logprobs))
                    context.set_trailing_metadata(replies.trailers(event, answer.reasoning_tokens))

    async def TokenizeString(
        self, request: pb.PredictOptions, _context: Context
    ) -> pb.TokenizationResponse:
        self._engine.require_model()
        require_neutral(TOKENIZE_STRING, request)
        require_most("Prompt", request.Prompt, LARGEST_TEXT, "characters")
        tokens = await self._engine.tokenize(request.Prompt)
        return pb.TokenizationResponse(length=len(tokens), tokens=tokens)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, _context: Context
    ) -> pb.DetokenizeResponse:
        self._engine.require_model()
        require_most("tokens", request.tokens, MOST_IDS, "ids")
        return pb.DetokenizeResponse(content=await self._engine.detokenize(list(request.tokens)))

    async def Status(self, _: pb.HealthMessage, context: Context) -> pb.StatusResponse:
        status = await self._engine.status()
        metrics = self._engine.metrics()
        if shown := (*replies.metrics_trailers(metrics), *replies.rank_trailers(status.ranks)):
            context.set_trailing_metadata(shown)
        memory = pb.MemoryUsageData(total=status.total_bytes, breakdown=status.breakdown)
        return pb.StatusResponse(state=_STATES[status.state], memory=memory)

    async def GetMetrics(self, _: pb.MetricsRequest, context: Context) -> pb.MetricsResponse:
        metrics = self._engine.metrics()
        if shown := replies.metrics_trailers(metrics):
            context.set_trailing_metadata(shown)
        return pb.MetricsResponse(
            tokens_per_second=metrics.tokens_per_second,
            tokens_generated=min(metrics.tokens_generated, _INT32_MAX),
            prompt_tokens_processed=min(metrics.prompt_tokens_processed, _INT32_MAX),
        )

    async def ModelMetadata(
        self, _: pb.ModelOptions, _context: Context
    ) -> pb.ModelMetadataResponse:
        served = self._engine.require_model()
        chat = served.format_of(tools=True)
        markers = pb.ToolFormatMarkers()
        if chat.reasoning_markers is not None:
            markers.reasoning_start, markers.reasoning_end = chat.reasoning_markers
        if chat.tool_call_markers is not None:
            markers.format_type = chat.name
            markers.section_start, markers.section_end = chat.tool_call_markers
        return pb.ModelMetadataResponse(
            supports_thinking=chat.thinks,
            rendered_template=served.rendered_template,
            tool_format=markers,
            media_marker=served.media_marker,
        )

    async def AudioTranscription(
        self, request: pb.TranscriptRequest, _context: Context
    ) -> pb.TranscriptResult:
        async with aclosing(transcribe(self._engine, request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, pb.TranscriptResult):
                    return piece
        raise AssertionError("a transcription ends with its result, or raises")

    async def AudioTranscriptionStream(
        self, request: pb.TranscriptRequest, context: Context
    ) -> None:
        async with aclosing(transcribe(self._engine, request)) as pieces:
            async for piece in pieces:
                await context.write(
                    pb.TranscriptStreamResponse(delta=piece)
                    if isinstance(piece, str)
                    else pb.TranscriptStreamResponse(final_result=piece)
                )
