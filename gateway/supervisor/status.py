"""The state of each model, for /ready, /metrics and the page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of a model.

    FAILED is tried again by the next request, BACKING_OFF only after its pause. BROKEN has an
    invalid file.
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
    """The state of one model. `error` may contain paths: clients do not get them."""

    name: str
    state: State
    pid: int | None = None  # the process, if the gateway has started it
    port: int | None = None
    memory_bytes: int = 0
    download: tuple[int, int] | None = None  # MiB already downloaded, and in all, during a download
    leases: int = 0  # requests that use the model, or wait for it
    restarts: int = 0  # after crashes
    error: str = ""  # the last failure; empty after a successful load
    leaves_at: float | None = None  # seconds since the epoch, if no request comes; None: never
