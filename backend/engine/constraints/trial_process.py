"""The program that tries grammars before the backend compiles them; see `trial`.

It reads one JSON object per line and answers with one. If a grammar exceeds a limit, the process
ends instead: by a signal for the stack (SIGSEGV) or the time (SIGPROF), or with the exit code
TOO_LARGE for the memory. It ends when its input is closed, so it never outlives the backend.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import llguidance

from backend.engine.constraints.grammar_limits import (
    CPU_SECONDS,
    MEMORY,
    READING_DEPTH,
    STACK,
    TOO_LARGE,
)
from backend.engine.constraints.matching import TokenizerSource, matcher_of, on_stack
from backend.engine.constraints.reading import grammar_of
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.constraints.special_tokens import SpecialTokens
from backend.engine.errors import InvalidRequest
from backend.engine.peak_memory import peak_memory

_WATCH_SECONDS = 0.02


def main() -> None:
    """Answer until the input ends. The argument is a file descriptor with a TokenizerSource."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(READING_DEPTH)
    with suppress(OSError):  # if memory runs out, this process is killed before the backend
        Path("/proc/self/oom_score_adj").write_text("1000")
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        file.seek(0)  # an earlier child may have read it
        tokens = TokenizerSource(**json.load(file)).read()
    limit = peak_memory() + MEMORY

    def watch(*_: object) -> None:
        if peak_memory() > limit:
            os._exit(TOO_LARGE)

    signal.signal(signal.SIGALRM, watch)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, _WATCH_SECONDS, _WATCH_SECONDS)
        reply = on_stack(STACK, partial(_answer, tokens, line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _answer(tokens: llguidance.LLTokenizer, line: bytes) -> dict[str, Any]:
    request = json.loads(line)
    if "grammars" in request:
        return {"error": matcher_of(tokens, request["grammars"]).get_error()}
    special = SpecialTokens(request["special"])
    try:
        spec = ConstraintSpec(**request["spec"])
        return {"grammar": grammar_of(spec, request["format"], special)}
    except InvalidRequest as refusal:
        return {"refusal": str(refusal)}
    except RecursionError:
        return {"refusal": "the constraint on the answer is nested too deeply"}


if __name__ == "__main__":
    main()
