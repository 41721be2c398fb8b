"""Runs a program that decodes one file, as a child process, and reads its answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from typing import Any

from backend.engine.errors import EngineFailed
from backend.engine.media.items import BadItem
from common.bounded_process import TOO_LARGE, output_of
from common.process_end import end_of


def answer_of(
    program: str,
    task: Mapping[str, Any],
    content: bytes,
    seconds: float,
    nouns: str,
    slow: str,
    large: str,
) -> tuple[dict[str, Any], memoryview]:
    """Decode a file in a child process; return the program's JSON object, and the decoded bytes.

    program: the module to run.
    task: the program's argument.
    seconds: maximum wall time.
    nouns: what the program decodes, for messages, such as `videos`.
    slow, large: the error for a file that takes too long, or too much memory.

    Raises BadItem, also if decoding crashes, and EngineFailed if the file is not the cause.
    """
    causes = {-signal.SIGXCPU: slow, -signal.SIGKILL: large, TOO_LARGE: large}
    ended = output_of(program, task, content, seconds, os.environ)
    if ended.code is None:
        raise BadItem(slow)
    if ended.code in causes or (ended.code < 0 and ended.code != -signal.SIGILL):
        raise BadItem(causes.get(ended.code, "cannot be decoded: it crashes the decoder"))
    if ended.code:
        raise EngineFailed(end_of(f"the process that decodes {nouns}", ended.code))
    end = ended.output.index(b"\n")
    answer: dict[str, Any] = json.loads(ended.output[:end])
    if "refusal" in answer:
        raise BadItem(answer["refusal"])
    return answer, memoryview(ended.output)[end + 1 :]
