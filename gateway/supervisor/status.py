"""The state of each model, for /ready, /metrics and the page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Where a model is. FAILED is tried again by the next request, BACKING_OFF not before time.

    BROKEN has a file that cannot be used.
    """

    STOPPED = "stopped"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"
    BACKING_OFF = "backing off"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model now. `progress` and `error` may name paths: they are for the owner, not clients."""

    name: str
    state: State
    pid: int | None = None  # of a backend that was started here
    port: int | None = None
    progress: str = ""  # the backend's last words while it loads
    memory_bytes: int = 0
    download: tuple[int, int] | None = None  # MiB that are there, and all, while it is fetched
    leases: int = 0  # requests that hold the model now, or wait for it
    loaded_since: float | None = None  # seconds since the epoch
    restarts: int = 0  # after crashes
    error: str = ""  # of the last failure; empty after a load that went well
