"""The program that tries grammars before the backend compiles them; see `trial`.

Over a socket to the backend, the program receives another socket for each grammar, and forks. The
fork reads JSON objects from the new socket, one per line, and answers each with a JSON object. A
request has either `grammars`, to compile, or `spec`, a constraint to convert into a grammar. If a
grammar exceeds a limit, the fork ends instead: by SIGSEGV (stack), by SIGPROF (time), or with the
exit code TOO_LARGE (memory); the program then writes how the fork ended. The program exits when the
backend closes its socket, so it never outlives the backend.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import llguidance

from backend.engine.constraints.matching import TokenizerSource, matcher_of, on_stack
from backend.engine.constraints.reading import grammar_of
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.constraints.trial import (
    CPU_SECONDS,
    MEMORY,
    NO_PROCESS,
    QUICK_SECONDS,
    READING_DEPTH,
    STACK,
    TOO_LARGE,
)
from backend.engine.errors import InvalidRequest, refused_by_system
from common.call_grammar.rules import SpecialTokens
from common.formats.shapes import from_record
from common.peak_memory import peak_memory

_WATCH_SECONDS = 0.02


def main() -> None:
    """Fork for each grammar until the socket is closed.

    The two arguments on the command line are file descriptors: the first of a file with a
    TokenizerSource as JSON, the second of the socket.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(READING_DEPTH)
    with suppress(OSError):  # if memory runs out, this process is killed before the backend
        Path("/proc/self/oom_score_adj").write_text("1000")
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
        file.seek(0)  # an earlier child may have read it
        tokens = TokenizerSource(**json.load(file)).read()
    channel = socket.socket(fileno=int(sys.argv[2]))
    ended, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    arrivals = select.poll()  # `select.select` accepts no descriptor above 1023
    for source in (channel, ended):
        arrivals.register(source, select.POLLIN)
    replies: dict[int, socket.socket] = {}
    while True:
        ready = {descriptor for descriptor, _ in arrivals.poll()}
        if ended.fileno() in ready:
            ended.recv(4096)
            _report_ended(replies)
        if channel.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(channel, 1, 1)
            if not message:
                return
            reply_to = socket.socket(fileno=fds[0])
            try:
                fork = os.fork()
            except BlockingIOError:
                _report(reply_to, NO_PROCESS)
                continue
            if fork == 0:
                for other in (channel, *replies.values()):
                    other.close()
                _try(tokens, reply_to)
            replies[fork] = reply_to


def _report_ended(replies: dict[int, socket.socket]) -> None:
    """Reap the forks that have ended; for one that failed, send how it ended."""
    for fork in list(replies):
        gone, status = os.waitpid(fork, os.WNOHANG)
        if gone:
            _report(replies.pop(fork), os.waitstatus_to_exitcode(status))


def _report(reply_to: socket.socket, code: int) -> None:
    """Send how a fork ended, unless it succeeded, and close the socket."""
    with reply_to, suppress(OSError):
        if code:
            reply_to.sendall(json.dumps({"ended": code}).encode() + b"\n")


def _try(tokens: llguidance.LLTokenizer, reply_to: socket.socket) -> NoReturn:
    """Answer requests until the socket is closed. Runs in a fork."""
    signal.set_wakeup_fd(-1)
    try:
        with reply_to.makefile("rwb") as conversation:
            while request := conversation.readline():
                reply = _limited(tokens, json.loads(request))
                conversation.write(json.dumps(reply).encode() + b"\n")
                conversation.flush()
        os._exit(0)
    except BaseException as fault:
        os._exit(NO_PROCESS if refused_by_system(fault) else 1)


def _limited(tokens: llguidance.LLTokenizer, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request within the limits; `bytes` in the answer is the memory that it needed."""
    before = peak_memory()

    def watch(*_: object) -> None:
        if peak_memory() > before + MEMORY:
            os._exit(TOO_LARGE)

    signal.signal(signal.SIGALRM, watch)
    if not request["quick"]:
        os.nice(10)  # generating tokens is more urgent
    seconds = QUICK_SECONDS if request["quick"] else CPU_SECONDS
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WATCH_SECONDS, _WATCH_SECONDS)
    reply = on_stack(STACK, partial(_answer, tokens, request))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return reply | {"bytes": peak_memory() - before}


def _answer(tokens: llguidance.LLTokenizer, request: Mapping[str, Any]) -> dict[str, Any]:
    if "grammars" in request:
        return {"error": matcher_of(tokens, request["grammars"]).get_error()}
    special = SpecialTokens(request["special"])
    try:
        spec = ConstraintSpec(**request["spec"])
        shape = request["shape"] and from_record(request["shape"])
        return {"grammar": grammar_of(spec, request["format"], special, shape)}
    except InvalidRequest as refusal:
        return {"refusal": str(refusal)}
    except RecursionError:
        return {"refusal": "the constraint on the answer is nested too deeply"}


if __name__ == "__main__":
    main()
