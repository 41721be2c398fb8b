"""An engine with an embedding model, called without the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.label_reader import Entity, LabelReader
from backend.engine.embedding.readers import Embedded, PairReader, Ranked, TextReader
from backend.engine.engine import Engine
from backend.engine.load_request import LoadRequest


@asynccontextmanager
async def serving(folder: Path, **request: Any) -> AsyncIterator[Engine]:
    engine = Engine()
    engine.start()
    try:
        await engine.load(LoadRequest("m", str(folder), **request))
        yield engine
    finally:
        await engine.stop(10)


async def embed(engine: Engine, text: str) -> Embedded:
    reader = engine.reader(TextReader)
    pieces: list[Piece] = reader.read_text(text)
    return reader.answer(pieces, await engine.encode(lambda: pieces))


async def rerank(
    engine: Engine,
    query: str,
    documents: list[str],
    top_n: int = 0,
    truncate: bool | None = None,
) -> list[Ranked]:
    reader = engine.reader(PairReader)
    encoded = await engine.encode(lambda: reader.read(query, documents, truncate=truncate))
    return reader.answer(encoded, top_n)


async def entities(engine: Engine, text: str, threshold: float = 0.0) -> list[Entity]:
    reader = engine.reader(LabelReader)
    read = reader.read(text)
    return reader.answer(read, await engine.encode(lambda: read.pieces), threshold)
