"""The Rerank RPC: documents sorted by relevance to a query."""

from __future__ import annotations

from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.readers import PairReader
from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.rpc.call_log import note
from backend.rpc.input_switches import InputSwitches
from common.field_names import named
from common.rerank_limits import MOST_DOCUMENTS
from wire import backend_pb2 as pb


async def answer(
    engine: Engine, request: pb.RerankRequest, switches: InputSwitches
) -> tuple[pb.RerankResult, int]:
    """Answer a Rerank call; also returns the number of tokens that were truncated.

    Raises WrongKind, InvalidRequest, TooLong, Overloaded.
    """
    reader = engine.reader(PairReader)
    _require_sound(request)
    documents = list(request.documents)
    pieces: list[Piece] = []

    def read() -> list[Piece]:
        pieces.extend(reader.read(request.query, documents, truncate=switches.truncate))
        return pieces

    size = len(documents) * len(request.query) + sum(map(len, documents))
    ranked = reader.answer(await engine.encode(read, size), request.top_n)
    tokens = sum(len(piece.ids) for piece in pieces)
    note(prompt_tokens=tokens)
    result = pb.RerankResult(
        usage=pb.Usage(total_tokens=tokens, prompt_tokens=tokens),
        results=[
            pb.DocumentResult(index=one.index, text=documents[one.index], relevance_score=one.score)
            for one in ranked
        ],
    )
    return result, sum(piece.cut for piece in pieces)


def _require_sound(request: pb.RerankRequest) -> None:
    if not request.query:
        raise InvalidRequest(
            f"{named('query')} is empty: send the text to compare the documents with"
        )
    if not request.documents:
        raise InvalidRequest(f"{named('documents')} is empty: send at least one")
    if len(request.documents) > MOST_DOCUMENTS:
        raise InvalidRequest(
            f"{named('documents')} has {len(request.documents)} entries: send at most"
            f" {MOST_DOCUMENTS}",
        )
    for index, document in enumerate(request.documents):
        if not document:
            raise InvalidRequest(f"{named(f'documents[{index}]')} is empty: leave it out")
    if request.top_n < 0:
        raise InvalidRequest(f"{named('top_n')} is {request.top_n}: send a count, or 0 for all")
