"""`python -m backend --addr HOST:PORT`: the process that a host starts through run.sh.

Only the gRPC side is imported here. A host calls Health from the start and gives up after a while
(LocalAI after 40 seconds), and importing MLX takes long, so the engine thread imports it with the
first load.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from backend.rpc import logs
from common import inherited_signals
from common.child_environment import restore_libraries
from common.log_lines import stamp, traceback_of
from common.machine_memory import return_large_blocks
from common.standard_streams import open_closed_streams
from common.version import VERSION

if TYPE_CHECKING:
    from backend.engine.ranks.leader import Leader
    from backend.engine.ranks.rank_info import RankInfo

TOKEN = "LOCALAI_GRPC_AUTH_TOKEN"
LEVEL = "MLX_BACKEND_LOG"
_FAILED = 1
_MISUSED = 2
# The interpreter's switch interval. A call changes threads a dozen times, and during the prefill of
# a long prompt each change may take as long as this interval.
_SWITCH_SECONDS = 0.001
_STACK_BYTES = 8 << 20
# Turns gRPC's fork handlers off. They stop gRPC's threads, and end the process if these cannot be
# started again. Python forks only if the system refuses a quicker way, as at its process limit.
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the process to its end. Returns the exit code; the last log line is its cause."""
    started = time.monotonic()
    inherited_signals.reset()
    os.environ[_FORK_SUPPORT] = "0"
    try:
        logs.configure(environ.get(LEVEL, ""))
    except RuntimeError:  # there is not even a thread for the log
        from backend.engine.errors import REFUSED

        os.write(2, f'{stamp()} level=error event=exit cause="{REFUSED}"\n'.encode())
        return _FAILED
    try:
        return _run(arguments, environ, started)
    except Exception as failure:
        from backend.engine.errors import refused_by_system

        refusal = refused_by_system(failure)
        (logs.debug if refusal else logs.error)("uncaught", traceback=traceback_of(failure))
        logs.error("exit", cause=refusal or f"internal error: {type(failure).__name__}")
        return _FAILED
    finally:
        logs.flush()


def _say(*lines: str) -> int:
    """Print the lines, of which a reader such as `head` may read only the first."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest when it ends
    return 0


def _run(arguments: Sequence[str], environ: Mapping[str, str], started: float) -> int:
    from backend.rpc.address import RANKS_USAGE, USAGE, AddressInUse, UsageError, address_of

    if {"-h", "--help"} & set(arguments):
        return _say(USAGE, RANKS_USAGE)
    if "--version" in arguments:
        return _say(f"mlx-backend {VERSION}")
    logs.take_stdout()
    from backend.engine.ranks.rank_info import TOKEN as RANKS_TOKEN
    from backend.engine.ranks.rank_info import RankInfo

    info = RankInfo.read(environ)
    secret = environ.get(RANKS_TOKEN, "")
    if info is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a rank that waits too long for others
        os.environ.pop(RANKS_TOKEN, None)  # not for the processes that this one starts
    if info is None and (code := _supervise(arguments, environ)) is not None:
        return code
    if info is not None and info.rank > 0:
        return _follow(info, secret, environ)
    try:
        address = address_of(arguments)
    except UsageError as misuse:
        logs.error("exit", cause=misuse)
        return _MISUSED

    from backend.engine.engine import Engine
    from backend.engine.errors import InvalidRequest, Overloaded
    from backend.rpc import parent_watch
    from backend.rpc.lifetime import EngineStopped, serve

    sys.setswitchinterval(_SWITCH_SECONDS)
    return_large_blocks()
    _require_folder()
    _require_stack()
    watched = parent_watch.arm(environ)
    token = environ.get(TOKEN, "")

    def ready(port: int) -> None:
        ms = (time.monotonic() - started) * 1000
        logs.always(
            "listening",
            addr=f"{address.host}:{port}",
            auth=bool(token),
            parent_watch=watched,
            version=VERSION,
            ms=ms,
        )

    loop = asyncio.new_event_loop()
    try:
        engine = Engine(_leader(info, secret) if info is not None else None)
        loop.run_until_complete(serve(engine, address, token, ready))
    except UsageError as misuse:
        logs.error("exit", cause=misuse)
        return _MISUSED
    except InvalidRequest as refusal:
        logs.error("exit", cause=refusal)
        return _MISUSED
    except (AddressInUse, EngineStopped, Overloaded) as failure:
        logs.error("exit", cause=failure)
        return _FAILED
    return 0


def _require_folder() -> None:
    """Leave a working folder that has been deleted, because libraries fail there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def _require_stack() -> None:
    """Give new threads a stack of the usual size if the process's limit is lower."""
    most, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if 0 <= most < _STACK_BYTES:
        threading.stack_size(_STACK_BYTES)


def _supervise(arguments: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Start the ranks and wait until they end; None if the command line asks for no ranks."""
    from backend.engine.ranks.rank_info import Misuse
    from backend.supervising.command_line import plan_of

    try:
        plan = plan_of(arguments, environ)
    except Misuse as misuse:
        logs.error("exit", cause=misuse)
        return _MISUSED
    if plan is None:
        return None
    from backend.supervising.supervisor import Supervisor

    return Supervisor(plan, environ).run()


def _leader(info: RankInfo, secret: str) -> Leader:
    from backend.engine.ranks.leader import Leader

    return Leader(info, secret)


def _follow(info: RankInfo, secret: str, environ: Mapping[str, str]) -> int:
    """Run as a rank other than 0.

    It ends when rank 0 tells it to, and ignores signals to the process group.
    """
    from backend.rpc import parent_watch

    def end(code: int) -> NoReturn:
        logs.flush()
        os._exit(code)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent_watch.arm(environ)
    from backend.engine.mlx_lm_import import import_mlx_lm

    import_mlx_lm()  # before the modules that import mlx-lm themselves
    from backend.engine.ranks.follower import follow

    follow(info, secret, end)


if __name__ == "__main__":
    open_closed_streams()
    restore_libraries(os.environ)
    code = main(sys.argv[1:], os.environ)
    if sys.stdout is not None:
        sys.stdout.flush()
    # Skip the interpreter's shutdown, which would wait for threads that are busy in MLX.
    os._exit(code)
