"""`python -m backend` with a fault that SIGUSR1 sets off; the first argument names it.

`released`: a decode step blocks for ever, like a kernel that never ends. `stopped`: it blocks for
75 seconds. `held`: for ever, inside a native call that keeps the interpreter's lock. `slow`: every
decode step takes half a second more. `slow-load`: a stage of a load takes 12 seconds more.
`hung-load`: it waits for ever.

The second argument is the least automatic `step_timeout`, in seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from backend import __main__ as entry
from backend.engine import device, worker
from backend.engine.executing import batch

_EVER = 100_000


def _hold_the_lock() -> None:
    sleep: Any = ctypes.PyDLL(None).sleep
    sleep(_EVER)


_WAYS: dict[str, tuple[Any, str, Callable[[], None]]] = {
    "released": (batch.DecodeBatch, "read", lambda: time.sleep(_EVER)),
    "stopped": (batch.DecodeBatch, "read", lambda: time.sleep(75)),
    "held": (batch.DecodeBatch, "read", _hold_the_lock),
    "slow": (batch.DecodeBatch, "read", lambda: time.sleep(0.5)),
    "slow-load": (device, "detect", lambda: time.sleep(12)),
    "hung-load": (device, "detect", lambda: time.sleep(_EVER)),
}


def main() -> int:
    """Run the backend with the fault built in.

    Stdout gets the engine thread's id, then each fault.
    """
    wrong = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: wrong.set())
    place, name, go_wrong = _WAYS[sys.argv[1]]
    well, loop = getattr(place, name), worker.Worker._main

    def faulty(*arguments: Any) -> Any:
        if wrong.is_set():
            print("wrong", file=sys.__stdout__, flush=True)
            go_wrong()
        return well(*arguments)

    def announced(self: worker.Worker) -> None:
        print(threading.get_native_id(), file=sys.__stdout__, flush=True)
        loop(self)

    setattr(place, name, faulty)
    worker.Worker._main = announced  # type: ignore[method-assign]
    device.LEAST_STEP_TIMEOUT = int(sys.argv[2])
    return entry.main(sys.argv[3:], os.environ)


if __name__ == "__main__":
    os._exit(main())
