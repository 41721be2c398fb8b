"""`/responses/compact`: a conversation as a summary that the model itself writes.

The summary is plain text in the field for encrypted content, as that of reasoning is.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from gateway.errors import ApiError
from gateway.generation import Usage
from gateway.openai.anthropic_parts import SEAL
from gateway.responses.answer import usage_of
from gateway.responses.items import Message
from gateway.responses.request import ReasoningConfig

REQUEST = Message.model_validate(
    {
        "role": "user",
        "content": "Summarise this conversation for an assistant that continues it and sees nothing"
        " else. State what the user asked for and every condition, what was done and decided, the"
        " paths, names, commands and figures that matter, what failed, and the next step. Leave"
        " out what is no longer needed. Write only the summary.",
    }
)
# A summary calls no tool, has no required form, and needs no reasoning.
WITHOUT = {
    "tools": None,
    "tool_choice": None,
    "text": None,
    "reasoning": ReasoningConfig(effort="none"),
}


def answer(summary: str, used: Usage) -> dict[str, Any]:
    """The answer to a request. Raises ApiError for an empty summary."""
    if not summary.strip():
        raise ApiError(502, "the model wrote an empty summary: send the request again")
    item = {
        "type": "compaction",
        "id": f"cmp_{uuid.uuid4().hex}",
        "status": "completed",
        "encrypted_content": SEAL + summary.strip(),
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [item],
        "usage": usage_of(used),
    }
