"""A recording that is divided into pieces, each of which is a request to the engine."""

from __future__ import annotations

import pytest

from backend.engine.engine import Engine
from backend.engine.errors import Cancelled
from backend.engine.load_request import LoadRequest
from backend.engine.speech.transcript import Transcribed
from backend.rpc.transcription import _by_prompts
from tests.acceptance.backend import ROOT
from tests.engine.speech.tiny_speech import speech
from wire import backend_pb2 as pb

TINY_OMNI = str(ROOT / "tests" / "models" / "tiny_omni")


async def test_another_model_does_not_continue_a_transcript() -> None:
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("first", TINY_OMNI))
        request = pb.TranscriptRequest(prompt="Is the sound high or low?")
        pieces = _by_prompts(engine, engine.require_model(), request, "", speech(40.0))
        async for piece in pieces:
            if isinstance(piece, Transcribed):
                break
        await engine.load(LoadRequest("second", TINY_OMNI))
        with pytest.raises(Cancelled, match="another model was loaded"):
            await anext(pieces)
    finally:
        await engine.stop(10)
