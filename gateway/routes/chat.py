"""`/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from gateway.context import GatewayDep
from gateway.generation import Piece, generate
from wire import backend_pb2 as pb

router = APIRouter(tags=["chat"])


class ChatRequest(BaseModel):
    """The smallest chat request."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = 0
    temperature: float = 1.0


@router.post("/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, gateway: GatewayDep) -> StreamingResponse:
    """A streamed answer."""

    async def events() -> AsyncIterator[str]:
        async with gateway.supervisor.lease(body.model) as lease:
            options = pb.PredictOptions(
                ModelIdentity=lease.identity,
                Messages=[
                    pb.Message(role=turn["role"], content=turn["content"]) for turn in body.messages
                ],
                UseTokenizerTemplate=True,
                Tokens=body.max_tokens,
                Temperature=body.temperature,
                Seed=-1,
            )
            async for event in generate(lease.stub, options):
                delta = {"content": event.content} if isinstance(event, Piece) else {}
                reason = None if isinstance(event, Piece) else event.finish_reason
                chunk = {
                    "id": "chatcmpl-1",
                    "object": "chat.completion.chunk",
                    "created": int(time.time()),
                    "model": body.model,
                    "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
                }
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
