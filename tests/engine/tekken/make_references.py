"""Prints the tokens that mistral-common makes of the conversations.

Run where mistral-common is installed; the project itself does not need it:

    python -m tests.engine.tekken.make_references >tests/engine/tekken/references.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engine.tekken.tekken_file import CONVERSATIONS, VERSIONS, Conversation, write_tekken


def tokens_of(tokenizer: Any, conversation: Conversation) -> list[int] | None:
    """The conversation's tokens; None if mistral-common refuses it."""
    from mistral_common.protocol.instruct.request import (  # type: ignore[import-not-found]
        ChatCompletionRequest,
    )

    messages, tools = conversation
    try:
        request = ChatCompletionRequest.from_openai(messages=messages, tools=tools or None)
        tokens: list[int] = tokenizer.encode_chat_completion(request).tokens
    except Exception as refusal:
        print(type(refusal).__name__, str(refusal)[:200], file=sys.stderr)
        return None
    return tokens


def main() -> None:
    from mistral_common.tokens.tokenizers.mistral import (  # type: ignore[import-not-found]
        MistralTokenizer,
    )

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            tokenizer = MistralTokenizer.from_file(
                write_tekken(Path(folder), version) / "tekken.json"
            )
            found[version] = {
                name: tokens_of(tokenizer, one) for name, one in CONVERSATIONS.items()
            }
    print(json.dumps(found, indent=0))


if __name__ == "__main__":
    main()
