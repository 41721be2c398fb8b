"""The Embedding RPC: a text, or its tokens, to one vector or to one vector per token.

LocalAI fills the other fields of PredictOptions as for a generation; sampling fields have no effect
here. Fields that would be expected to change the vector are refused.
"""

from __future__ import annotations

from backend.engine.embedding.encoding import Piece
from backend.engine.embedding.readers import TextReader
from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.rpc.call_log import note
from backend.rpc.input_switches import InputSwitches
from common.field_names import named
from wire import backend_pb2 as pb

_NOT_READ = {
    "Prompt": "send the text as Embeddings",
    "Messages": "render the conversation, and send it as Embeddings",
    "Images": "only text is embedded; send none",
    "Videos": "only text is embedded; send none",
    "Audios": "only text is embedded; send none",
}


async def answer(
    engine: Engine, options: pb.PredictOptions, switches: InputSwitches
) -> tuple[pb.EmbeddingResult, int]:
    """Answer an Embedding call; also returns the number of tokens that were truncated.

    Raises WrongKind, InvalidRequest, TooLong, Overloaded.
    """
    reader = engine.reader(TextReader)
    _require_one_input(options)
    pieces: list[Piece] = []

    def read() -> list[Piece]:
        if options.EmbeddingTokens:
            tokens = options.EmbeddingTokens
            pieces.extend(reader.read_tokens(tokens, truncate=switches.truncate))
        else:
            pieces.extend(
                reader.read_text(
                    options.Embeddings,
                    prompt_name=switches.prompt_name,
                    truncate=switches.truncate,
                )
            )
        return pieces

    size = len(options.Embeddings) + len(options.EmbeddingTokens)
    embedded = reader.answer(pieces, await engine.encode(read, size))
    note(prompt_tokens=embedded.prompt_tokens)
    result = pb.EmbeddingResult(
        embeddings=embedded.values,
        tokens=embedded.rows,
        dim=embedded.dim,
        prompt_tokens=embedded.prompt_tokens,
        layout=pb.EMBEDDING_LAYOUT_PER_TOKEN if embedded.per_token else pb.EMBEDDING_LAYOUT_FINAL,
    )
    return result, embedded.truncated


def _require_one_input(options: pb.PredictOptions) -> None:
    for name, instead in _NOT_READ.items():
        if getattr(options, name):
            raise InvalidRequest(f"{named(name)} is set, but Embedding does not read it: {instead}")
    if options.Embeddings and options.EmbeddingTokens:
        raise InvalidRequest(
            f"{named('Embeddings')} ({len(options.Embeddings)} characters) and EmbeddingTokens"
            f" ({len(options.EmbeddingTokens)} ids) are both set: send one of them",
        )
    if not options.Embeddings and not options.EmbeddingTokens:
        raise InvalidRequest(
            f"{named('Embeddings')} and EmbeddingTokens are both empty: send a text, or its tokens",
        )
