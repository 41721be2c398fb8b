"""The services beside LocalAI's: grpc.health.v1 and reflection.

gRPC's own health servicer holds a lock while it sends, so one client that reads nothing would block
the answers to all others, and the shutdown of the process. The protobuf pool finds the file of a
service or a message, but not of a method, which `grpcurl describe backend.Backend.Predict` needs.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.wording import shown

pb: Any = health_pb2  # the published types lack `List`
_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN
_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The service that reports the others as SERVING until `stop`; '' names the whole process."""

    def __init__(self, *services: str) -> None:
        self._services = ("", *services)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def Check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN:
            known = ", ".join(map(repr, self._services))
            message = f"there is no service {shown(request.service)}: ask for one of {known}"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return pb.HealthCheckResponse(status=status)

    async def List(self, _request: pb.HealthListRequest, _context: Any) -> pb.HealthListResponse:
        statuses = {
            name: pb.HealthCheckResponse(status=self._status(name)) for name in self._services
        }
        return pb.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> None:
        """Send the status, and again when it changes, until the client or the server ends it."""
        service = request.service if request.service in self._services else None
        del request  # the service's name may be long
        first = self._status(service)
        await context.write(pb.HealthCheckResponse(status=first))
        await self._stopped.wait()
        if (last := self._status(service)) != first:
            await context.write(pb.HealthCheckResponse(status=last))
        await asyncio.Event().wait()

    def _status(self, service: str | None) -> Any:
        if service not in self._services:
            return _UNKNOWN
        return _NOT_SERVING if self._stopped.is_set() else _SERVING


class _PoolWithMethods:
    """The default pool, extended to find a method in the file of its service."""

    def __init__(self, pool: DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            method: Any = self._pool.FindMethodByName(symbol)
            return cast(FileDescriptor, method.containing_service.file)


def enable_reflection(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    """Serve reflection for these services and for itself."""
    pool = cast(DescriptorPool, _PoolWithMethods(descriptor_pool.Default()))
    reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server, pool)
