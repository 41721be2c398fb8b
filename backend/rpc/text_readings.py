"""Serves the RPCs that read texts: Embedding, Rerank, Score and TokenClassify.

LocalAI fills the other fields of PredictOptions as for a generation; sampling fields have no effect
on a vector, and those that would be expected to change it are refused. Settings without a field in
the protocol are read from the metadata of the call, because the request of Rerank has no map like
the Metadata of PredictOptions.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from backend.engine.engine import Engine
from backend.engine.errors import InvalidRequest
from backend.engine.executing.score_plan import ScoreRequest, require_bounded
from backend.rpc.call_log import note
from backend.rpc.checks import require_alone, require_least, require_most
from backend.rpc.fields import EMBEDDING, require_neutral
from backend.rpc.replies import LEAST, TRUNCATED_TOKENS
from common.field_names import named
from common.rerank_limits import MOST_DOCUMENTS
from common.wording import shown
from wire import backend_pb2 as pb
from wire import backend_pb2_grpc

if TYPE_CHECKING:
    from backend.engine.embedding.encoding import Piece
    from backend.engine.embedding.label_reader import LabelledText

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
TRUNCATE = "mlx-truncate"
PROMPT_NAME = "mlx-prompt-name-bin"
INPUT_TYPE = "mlx-input-type"
INSTRUCTION = "mlx-instruction-bin"
_FLAGS = {"true": True, "false": False}


def _truncates(context: Context) -> bool | None:
    """Return whether an input that is too long loses its end. Raises InvalidRequest.

    None means that the model's options decide.
    """
    truncate = dict(context.invocation_metadata() or ()).get(TRUNCATE)
    if truncate is not None and truncate not in _FLAGS:
        raise InvalidRequest(f"{named(TRUNCATE)} is {shown(truncate)}: send true or false")
    return None if truncate is None else _FLAGS[str(truncate)]


def _text(context: Context, key: str) -> str | None:
    """Return a text from the metadata of a call; None if it is absent. Raises InvalidRequest."""
    text = dict(context.invocation_metadata() or ()).get(key)
    try:
        return text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError:
        raise InvalidRequest(f"{key} is not UTF-8: send text in UTF-8") from None


def _input_type(context: Context) -> str:
    from backend.engine.embedding.sentence_files import INPUT_TYPES

    stated = _text(context, INPUT_TYPE) or ""
    if stated and stated not in INPUT_TYPES:
        wanted = " or ".join(INPUT_TYPES)
        raise InvalidRequest(f"{named(INPUT_TYPE)} is {shown(stated)}: send {wanted}")
    return stated


def _report_truncated(context: Context, tokens: int) -> None:
    if tokens:
        note(truncated_tokens=tokens)
        context.set_trailing_metadata(((TRUNCATED_TOKENS, str(tokens)),))


def _require_one_input(options: pb.PredictOptions) -> None:
    require_neutral(EMBEDDING, options)
    if options.Metadata.get("mlx.adapter"):
        raise InvalidRequest(
            f"{named('Metadata mlx.adapter')} is set, but Embedding uses the model without the"
            " adapters of option adapters: send none"
        )
    if options.Embeddings:
        require_alone("Embeddings", {"EmbeddingTokens": options.EmbeddingTokens})
    if not options.Embeddings and not options.EmbeddingTokens:
        raise InvalidRequest(
            f"{named('Embeddings')} and EmbeddingTokens are both empty: send a text, or its tokens"
        )


def _require_rankable(request: pb.RerankRequest) -> None:
    if not request.query:
        raise InvalidRequest(
            f"{named('query')} is empty: send the text to compare the documents with"
        )
    if not request.documents:
        raise InvalidRequest(f"{named('documents')} is empty: send at least one")
    require_most("documents", request.documents, MOST_DOCUMENTS)
    require_least("top_n", request.top_n, 0, "a count, or 0 for all")


class TextReadings(backend_pb2_grpc.BackendServicer):
    """The RPCs that read texts. Each raises WrongKind, InvalidRequest, TooLong or Overloaded."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Embedding(self, options: pb.PredictOptions, context: Context) -> pb.EmbeddingResult:
        from backend.engine.embedding.readers import TextReader

        truncate, input_type = _truncates(context), _input_type(context)
        prompt_name = _text(context, PROMPT_NAME)
        reader = self._engine.reader(TextReader)
        _require_one_input(options)
        pieces: list[Piece] = []

        def read() -> list[Piece]:
            if options.EmbeddingTokens:
                found = reader.read_tokens(options.EmbeddingTokens, truncate=truncate)
            else:
                found = reader.read_text(
                    options.Embeddings,
                    prompt_name=prompt_name,
                    input_type=input_type,
                    truncate=truncate,
                )
            pieces.extend(found)
            return pieces

        size = len(options.Embeddings) + len(options.EmbeddingTokens)
        embedded = reader.answer(pieces, await self._engine.encode(read, size))
        note(prompt_tokens=embedded.prompt_tokens)
        _report_truncated(context, embedded.truncated)
        last, each = pb.EMBEDDING_LAYOUT_FINAL, pb.EMBEDDING_LAYOUT_PER_TOKEN
        layout = each if embedded.per_token else last
        return pb.EmbeddingResult(
            embeddings=embedded.values,
            tokens=embedded.rows,
            dim=embedded.dim,
            prompt_tokens=embedded.prompt_tokens,
            layout=layout,
        )

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResult:
        from backend.engine.embedding.readers import PairReader

        truncate, prompt = _truncates(context), _text(context, INSTRUCTION)
        reader = self._engine.reader(PairReader)
        _require_rankable(request)
        documents = list(request.documents)
        pieces: list[Piece] = []

        def read() -> list[Piece]:
            pieces.extend(reader.read(request.query, documents, truncate=truncate, prompt=prompt))
            return pieces

        size = len(documents) * len(request.query) + sum(map(len, documents))
        ranked = reader.answer(await self._engine.encode(read, size), request.top_n)
        tokens = sum(len(piece.ids) for piece in pieces)
        note(prompt_tokens=tokens)
        _report_truncated(context, sum(piece.cut for piece in pieces))
        return pb.RerankResult(
            usage=pb.Usage(total_tokens=tokens, prompt_tokens=tokens),
            results=[
                pb.DocumentResult(
                    index=text.index, text=documents[text.index], relevance_score=text.score
                )
                for text in ranked
            ],
        )

    async def TokenClassify(
        self, request: pb.TokenClassifyRequest, _context: Context
    ) -> pb.TokenClassifyResponse:
        """Return the entities in a text; an empty text has none."""
        from backend.engine.embedding.label_reader import LabelReader

        reader = self._engine.reader(LabelReader)
        if not 0 <= request.threshold <= 1:
            wanted = "a number from 0, for all, to 1"
            raise InvalidRequest(f"{named('threshold')} is {request.threshold:g}: send {wanted}")
        read_texts: list[LabelledText] = []

        def read() -> list[Piece]:
            read_texts.append(reader.read(request.text))
            return read_texts[0].pieces

        encoded = await self._engine.encode(read, len(request.text))
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

    async def Score(self, request: pb.ScoreRequest, _context: Context) -> pb.ScoreResponse:
        """Return natural logarithms; an empty candidate has the probability 1."""
        served = self._engine.require_text_model("Score")
        wanted = ScoreRequest(
            request_id=secrets.token_hex(6),
            prompt=request.prompt,
            candidates=tuple(request.candidates),
            stable_bytes=request.stable_prefix_len,
        )
        require_bounded(wanted)
        answer = pb.ScoreResponse()
        for tokens in await self._engine.score(wanted):
            values = [max(token.logprob, LEAST) for token in tokens]
            candidate = answer.candidates.add(log_prob=sum(values), num_tokens=len(values))
            if request.length_normalize and values:
                candidate.length_normalized_log_prob = candidate.log_prob / len(values)
            if request.include_token_logprobs:
                for token, value in zip(tokens, values, strict=True):
                    written = served.token_bytes(token.token).decode(errors="backslashreplace")
                    candidate.tokens.add(token=written, log_prob=value)
        return answer
