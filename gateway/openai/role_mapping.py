"""mlx_lm.server's `role_mapping`: the prompt as texts around the messages, without a template.

mlx_lm.server reads it for models that have no chat template; here it applies to every model,
because a client that sends it expects that.
"""

from __future__ import annotations

from gateway.errors import ApiError, bad_field
from gateway.openai.chat_request import RoleMapping
from gateway.openai.messages_to_wire import WireMessages
from wire import backend_pb2 as pb


def prompt_of(mapping: RoleMapping, found: WireMessages, options: pb.PredictOptions) -> str:
    """The prompt's text. Raises ApiError for an empty one, and for what needs a chat template."""
    if options.Tools or any(message.tool_calls for message in found.messages):
        raise _refused("tools and tool calls")
    if any(found.media.values()):
        raise _refused("images, videos and audio")
    texts = [
        f"{getattr(mapping, message.role, '')}{message.content}{mapping.stop}"
        for message in found.messages
    ]
    prompt = ("".join(texts) + mapping.assistant).rstrip()
    if not prompt:
        raise bad_field(
            "messages",
            "messages and role_mapping have no text between them: send a message to answer",
        )
    return prompt


def _refused(what: str) -> ApiError:
    sentence = f"role_mapping cannot be combined with {what}, which need the model's chat template"
    return bad_field("role_mapping", f"{sentence}: leave it out")
