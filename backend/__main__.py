"""`python -m backend --addr HOST:PORT`: the process that a host starts through run.sh.

Only the wire is imported here. The host probes Health from the first moment and gives up after
a while (contract 1.3), and MLX takes long to import, so the engine does that on its own thread
when the first model is loaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence

from backend.rpc import logs
from common.log_lines import traceback_of

TOKEN = "LOCALAI_GRPC_AUTH_TOKEN"
LEVEL = "MLX_BACKEND_LOG"
_FAILED = 1
_MISUSED = 2
# A call changes threads a dozen times, and waits that long each time while a long prompt is read.
_SWITCH_SECONDS = 0.001


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the process to its end; returns the exit code, its cause is the last line logged."""
    started = time.monotonic()
    logs.configure(environ.get(LEVEL, ""))
    try:
        return _run(arguments, environ, started)
    except KeyboardInterrupt:
        logs.error("exit", cause="interrupted before the server had started")
        return 130
    except Exception as failure:
        logs.error("uncaught", traceback=traceback_of(failure))
        logs.error("exit", cause=f"internal error: {type(failure).__name__}")
        return _FAILED
    finally:
        logs.flush()


def _run(arguments: Sequence[str], environ: Mapping[str, str], started: float) -> int:
    from backend.rpc.address import USAGE, AddressInUse, UsageError, address_of

    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        address = address_of(arguments)
    except UsageError as misuse:
        logs.error("exit", cause=misuse)
        return _MISUSED

    from backend.engine.engine import Engine
    from backend.rpc import parent_watch
    from backend.rpc.lifetime import EngineStopped, serve

    sys.setswitchinterval(_SWITCH_SECONDS)
    watched = parent_watch.arm(environ)
    token = environ.get(TOKEN, "")

    def ready(port: int) -> None:
        ms = (time.monotonic() - started) * 1000
        place = f"{address.host}:{port}"
        logs.info("listening", addr=place, auth=bool(token), parent_watch=watched, ms=ms)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(serve(Engine(), address, token, ready))
    except UsageError as misuse:
        logs.error("exit", cause=misuse)
        return _MISUSED
    except (AddressInUse, EngineStopped) as failure:
        logs.error("exit", cause=failure)
        return _FAILED
    return 0


def _restore(environ: MutableMapping[str, str]) -> None:
    """Put back what run.sh changed to preload OpenBLAS: that was for this process alone."""
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        before = environ.pop(f"MLX_BACKEND_{name}_BEFORE", None)
        if before:
            environ[name] = before
        elif before is not None:
            environ.pop(name, None)


def _open_standard_streams() -> None:
    """Whatever opened a file next would be given the number of a stream that is closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    _open_standard_streams()
    _restore(os.environ)
    code = main(sys.argv[1:], os.environ)
    if sys.stdout is not None:
        sys.stdout.flush()
    # Without the interpreter's own farewell: it would wait for threads that are busy in MLX.
    os._exit(code)
