"""ModelMetadata: a model's chat format, in the fields that LocalAI defines."""

from __future__ import annotations

from backend.engine.served_model import ServedModel
from wire import backend_pb2 as pb


def response(facts: ServedModel) -> pb.ModelMetadataResponse:
    """Thinking, a sample rendering, and the markers around calls and reasoning."""
    chat = facts.format_of(tools=True)
    markers = pb.ToolFormatMarkers()
    if chat.reasoning_markers is not None:
        markers.reasoning_start, markers.reasoning_end = chat.reasoning_markers
    if chat.tool_call_markers is not None:
        markers.format_type = chat.name
        markers.section_start, markers.section_end = chat.tool_call_markers
    return pb.ModelMetadataResponse(
        supports_thinking=chat.thinks,
        rendered_template=facts.rendered_template,
        tool_format=markers,
        media_marker=facts.media_marker,
    )
