"""`/audio/transcriptions` and `/audio/translations`, as OpenAI defines them."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from gateway import exchange, fields
from gateway.asking import ask
from gateway.calls import as_refusals
from gateway.context import Gateway, GatewayDep
from gateway.described import about
from gateway.errors import bad_field
from gateway.forms import Part, form_of
from gateway.openapi import streamed
from gateway.refusals import validated
from gateway.sse import DONE, Answer, respond
from gateway.supervisor.supervisor import Lease
from gateway.threads import offload
from wire import backend_pb2 as pb

router = APIRouter(tags=["audio"])
LARGEST_FILE = 36 << 20  # bytes: its base64 fits into a message of gRPC
_NAMES = {"dst": "file"}
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
Granularity = Literal["segment", "word"]
Asked = TypeVar("Asked", bound=fields.Request)
_NANOSECONDS = 1_000_000_000
Json = dict[str, Any]


class TranslationRequest(fields.Request):
    """A recording, which becomes text in English."""

    others = fields.TRANSCRIPTS

    file: str = Field(description="The recording, in any of the forms that a backend decodes.")
    prompt: str | None = about("Earlier text, or words that the recording may contain.")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = about(
        "The form of the answer.", "json"
    )
    temperature: float | None = about("0: the most likely text.", ge=0, le=1)


class TranscriptionRequest(TranslationRequest):
    """A recording, which becomes text in its own language."""

    language: str | None = about("A code such as en; by default the model detects it.")
    timestamp_granularities: Annotated[list[Granularity], Field(max_length=2)] = about(
        "What has times in verbose_json; default: segments.", []
    )
    stream: bool | None = about("Whether the text arrives in events.")


def _described(schema: type[fields.Request]) -> dict[str, Any]:
    """Return the form of a request for OpenAPI: pydantic's schema, in which the file is binary."""
    form = schema.model_json_schema()
    form["properties"]["file"] |= {"type": "string", "format": "binary"}
    content = {"multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


@router.post(
    "/audio/transcriptions",
    openapi_extra=_described(TranscriptionRequest),
    responses=streamed("OpenAI's transcription.", "`transcript.text.delta`s, then the whole text."),
)
async def transcriptions(request: Request, gateway: GatewayDep) -> Response:
    """Return the text of a recording, in one piece or as a stream of server-sent events."""
    asked = await _read(TranscriptionRequest, request)
    if asked.timestamp_granularities and asked.response_format != "verbose_json":
        message = "timestamp_granularities is set: send response_format verbose_json with it"
        raise bad_field(message, param="timestamp_granularities")
    if asked.stream and asked.response_format not in ("json", "verbose_json"):
        message = f"stream is true: send response_format json, not {asked.response_format}"
        raise bad_field(message, param="response_format")
    wanted = pb.TranscriptRequest(
        language=asked.language or "", timestamp_granularities=asked.timestamp_granularities
    )
    answer = _Transcript(asked.response_format, "transcribe", asked.timestamp_granularities)
    pieces = _pieces(asked, wanted, gateway)
    return await respond(pieces, answer, gateway.settings, streams=asked.stream is True)


@router.post("/audio/translations", openapi_extra=_described(TranslationRequest))
async def translations(request: Request, gateway: GatewayDep) -> Response:
    """Return the text of a recording in English."""
    asked = await _read(TranslationRequest, request)
    pieces = _pieces(asked, pb.TranscriptRequest(translate=True), gateway)
    answer = _Transcript(asked.response_format, "translate")
    return await respond(pieces, answer, gateway.settings, streams=False)


async def _read(schema: type[Asked], request: Request) -> Asked:
    """Read the request from a form. Raises ApiError."""
    fields = await offload(_fields, await form_of(request))
    exchange.current().model = str(fields.get("model") or "")[:200]
    return validated(schema, fields, strict=False)


def _fields(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the fields of a form, the recording as a data URI. Raises ApiError."""
    fields: dict[str, Any] = {}
    for part in parts:
        name = part.name.removesuffix("[]")
        if name in fields and name not in _LISTS:
            raise bad_field(f"{name} is in the form twice: send it once", param=name)
        if name == "file":
            if not part.content:
                raise bad_field("file is empty: send a recording", param="file")
            if len(part.content) > LARGEST_FILE:
                message = f"file has {len(part.content)} bytes: send at most {LARGEST_FILE}"
                raise bad_field(message, "request_too_large", param="file")
            # Bare base64 may begin with a slash, and would then be the path of a file.
            fields[name] = f"data:;base64,{base64.b64encode(part.content).decode()}"
        elif name in _LISTS:
            fields.setdefault(name, []).append(part.text)
        else:
            fields[name] = part.text
    return fields


async def _pieces(
    asked: TranslationRequest, wanted: pb.TranscriptRequest, gateway: Gateway
) -> AsyncGenerator[pb.TranscriptStreamResponse, None]:
    """Yield the parts of a transcript as the backend sends them. Raises ApiError."""
    wanted.dst = asked.file
    wanted.prompt = asked.prompt or ""
    wanted.temperature = asked.temperature or 0.0
    limit = gateway.settings.request_timeout

    async def send(lease: Lease) -> AsyncGenerator[pb.TranscriptStreamResponse, None]:
        wanted.ModelIdentity = lease.identity
        with as_refusals(_NAMES):
            call = lease.stub.AudioTranscriptionStream(wanted, timeout=limit or None)
            try:
                async for part in call:
                    yield part
            finally:
                call.cancel()

    async with aclosing(ask(lambda: gateway.supervisor.lease(asked.model), send, asked)) as parts:
        async for part in parts:
            yield part


class _Transcript(Answer[pb.TranscriptStreamResponse]):
    """A transcript in the requested form, or as OpenAI's events."""

    def __init__(self, form: str, task: str, granularities: Sequence[str] = ()) -> None:
        self._form = form
        self._task = task
        self._granularities = granularities
        self._result = pb.TranscriptResult()

    def take(self, event: pb.TranscriptStreamResponse) -> list[Json | str]:
        """Return events. The last one also has the fields of verbose_json, if that is requested."""
        if not event.HasField("final_result"):
            return [{"type": "transcript.text.delta", "delta": event.delta}]
        self._result = event.final_result
        return [{"type": "transcript.text.done"} | self._fields(), DONE]

    def beat(self) -> list[str]:
        return [": \n\n"]

    def whole(self) -> Json | str:
        if self._form in ("json", "verbose_json"):
            return self._fields()
        if self._form == "text":
            return f"{self._result.text}\n"
        return srt(self._result) if self._form == "srt" else vtt(self._result)

    def _fields(self) -> Json:
        if self._form == "verbose_json":
            return verbose(self._result, self._task, self._granularities)
        return {"text": self._result.text, "usage": usage_of(self._result)}


def usage_of(result: pb.TranscriptResult) -> Json:
    return {"type": "duration", "seconds": round(result.duration)}


def verbose(result: pb.TranscriptResult, task: str, wanted: Sequence[str]) -> Json:
    """Return the `verbose_json` form.

    wanted: any of segment and word; none means segment.
    """
    answer: Json = {
        "task": task,
        "language": result.language,
        "duration": round(result.duration, 3),
        "text": result.text,
    }
    if "segment" in wanted or not wanted:
        answer["segments"] = [
            {"id": each.id, "text": each.text, "tokens": [*each.tokens]} | _times(each)
            for each in result.segments
        ]
    if "word" in wanted:
        answer["words"] = [
            {"word": word.text} | _times(word)
            for segment in result.segments
            for word in segment.words
        ]
    return answer | {"usage": usage_of(result)}


def srt(result: pb.TranscriptResult) -> str:
    return "".join(
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{text}\n\n"
        for number, (each, text) in enumerate(_cues(result), 1)
    )


def vtt(result: pb.TranscriptResult) -> str:
    """Return the transcript as WebVTT, in which `&`, `<` and `>` have a meaning."""
    cues = (
        f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n"
        f"{text.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')}\n\n"
        for each, text in _cues(result)
    )
    return "WEBVTT\n\n" + "".join(cues)


def _cues(result: pb.TranscriptResult) -> Iterator[tuple[pb.TranscriptSegment, str]]:
    """Yield segments and their texts, without empty lines, which would end a cue."""
    for segment in result.segments:
        if text := "\n".join(line.strip() for line in segment.text.splitlines() if line.strip()):
            yield segment, text


def _times(part: pb.TranscriptSegment | pb.TranscriptWord) -> Json:
    return {"start": part.start / _NANOSECONDS, "end": part.end / _NANOSECONDS}


def _clock(nanoseconds: int, point: str) -> str:
    milliseconds = round(nanoseconds / 1_000_000)
    seconds, milliseconds = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"
