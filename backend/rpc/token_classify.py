"""The TokenClassify RPC: the entities in a text, with byte offsets."""

from __future__ import annotations

from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.label_reader import LabelledText, LabelReader
from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.rpc.call_log import note
from common.field_names import named
from wire import backend_pb2 as pb


async def answer(engine: Engine, request: pb.TokenClassifyRequest) -> pb.TokenClassifyResponse:
    """An empty text has no entities. Raises WrongKind, InvalidRequest, TooLong, Overloaded."""
    reader = engine.reader(LabelReader)
    if not 0 <= request.threshold <= 1:
        raise InvalidRequest(
            f"{named('threshold')} is {request.threshold:g}: send a number from 0, for all, to 1"
        )
    read_texts: list[LabelledText] = []

    def read() -> list[Piece]:
        read_texts.append(reader.read(request.text))
        return read_texts[0].pieces

    encoded = await engine.encode(read, len(request.text))
    entities = reader.answer(read_texts[0], encoded, request.threshold)
    note(prompt_tokens=len(read_texts[0].offsets))
    return pb.TokenClassifyResponse(
        entities=[
            pb.TokenClassifyEntity(
                entity_group=entity.group,
                start=entity.start,
                end=entity.end,
                score=entity.score,
                text=entity.text,
            )
            for entity in entities
        ]
    )
