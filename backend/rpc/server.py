"""The gRPC server: its services and limits, and how it starts and stops."""

from __future__ import annotations

import os
import resource

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from backend.engine.engine import Engine
from backend.engine.threads import require_threads
from backend.rpc.address import Address, AddressInUse, require_free
from backend.rpc.interceptors import SERVICE, CallInterceptor, TokenInterceptor
from backend.rpc.last_load import LastLoad
from backend.rpc.other_services import HealthServicer, enable_reflection
from backend.rpc.servicer import Servicer
from wire import backend_pb2_grpc

MOST_BYTES = 50 * 1024 * 1024  # LocalAI's own limit in both directions
_MOST_PENDING = 100_000
_OTHER_FILES = 256  # descriptors that are not for connections
_HANDSHAKE_SECONDS = 20.0  # how long a connection may be silent at its start
_IDLE_SECONDS = 300.0  # how long it may be without a call; clients connect again by themselves
_OPTIONS = (
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.max_receive_message_length", MOST_BYTES),
    # Calls that a client resets as soon as it has sent them remain for a while. Without a limit
    # they would accumulate until other calls are not answered. A client that knows the limit delays
    # further calls; calls sent before it knows are reset, so the limit is far above any burst.
    ("grpc.max_concurrent_streams", 1 << 13),
    ("grpc.so_reuseport", 0),  # otherwise two backends on one port would share its calls
    # If many calls arrive before the server accepts them, gRPC cancels some without an error
    # message. Accept them all instead: refusing them here is fast, and the caller learns why.
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
    ("grpc.server_max_unrequested_time_in_server", 600),  # seconds
)
# gRPC starts 4 to 16 threads of its own, by the number of processors, and a few for other work.
_GRPC_THREADS = min(max(os.cpu_count() or 16, 4), 16) + 4


def _of_connections() -> tuple[tuple[str, int], ...]:
    """Return options that close idle connections, to leave enough descriptors for a load."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(files - _OTHER_FILES, files // 2)
    few = (("grpc.max_allowed_incoming_connections", min(most, _MOST_PENDING)),)
    return (
        *(few if files != resource.RLIM_INFINITY else ()),
        ("grpc.server_handshake_timeout_ms", round(_HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", round(_IDLE_SECONDS * 1000)),
    )


class Server:
    """`backend.Backend`, grpc.health.v1 and reflection on one port.

    Creating it raises Overloaded if the system does not allow gRPC's threads.
    """

    def __init__(self, engine: Engine, token: str = "") -> None:
        require_threads(_GRPC_THREADS)  # without them, gRPC crashes the process or hangs
        last_load = LastLoad(os.environ)
        self._calls = CallInterceptor(last_load, engine.refuse_when_full)
        guards = [TokenInterceptor(token)] if token else []
        options = (*_OPTIONS, *_of_connections())
        self._server = grpc.aio.server(interceptors=[*guards, self._calls], options=options)
        self._health = HealthServicer(SERVICE)
        self.servicer = Servicer(engine, last_load)
        backend_pb2_grpc.add_BackendServicer_to_server(self.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        enable_reflection(self._server, (SERVICE, HEALTH))

    async def start(self, address: Address) -> int:
        """Bind and serve; returns the port. Raises AddressInUse or UsageError."""
        require_free(address)
        try:
            port: int = self._server.add_insecure_port(str(address))
        except RuntimeError:
            port = 0
        if port == 0:
            raise AddressInUse(f"cannot listen on {address}: is it an address of this machine?")
        await self._server.start()
        return port

    def refuse_new(self, *, failed: bool = False) -> None:
        """Answer further calls with UNAVAILABLE, and health checks with NOT_SERVING.

        failed: Status is still answered, because it reports the failure.
        """
        self._calls.close(but=("Status",) if failed else ())
        self._health.stop()

    async def stop(self, grace: float) -> None:
        """Close the port, give running answers `grace` seconds to end, cancel the rest."""
        await self._server.stop(grace)
