"""Transcripts in the forms of OpenAI's `response_format`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wire import backend_pb2 as pb

_NANOSECONDS = 1_000_000_000
Json = dict[str, Any]


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
        answer["segments"] = [_segment(segment) for segment in result.segments]
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
    """Yield segments with their texts, without the empty lines that would end a cue."""
    for segment in result.segments:
        if text := "\n".join(line.strip() for line in segment.text.splitlines() if line.strip()):
            yield segment, text


def _segment(segment: pb.TranscriptSegment) -> Json:
    return {"id": segment.id, "text": segment.text, "tokens": [*segment.tokens]} | _times(segment)


def _times(part: pb.TranscriptSegment | pb.TranscriptWord) -> Json:
    return {"start": part.start / _NANOSECONDS, "end": part.end / _NANOSECONDS}


def _clock(nanoseconds: int, point: str) -> str:
    milliseconds = round(nanoseconds / 1_000_000)
    seconds, milliseconds = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"
