"""Server reflection that can also look up methods.

The protobuf pool finds the file of a service or a message, but not of a method, which
`grpcurl describe backend.Backend.Predict` needs.
"""

from __future__ import annotations

from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection


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


def enable(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    """Serve reflection for these services and for itself."""
    pool = cast(DescriptorPool, _PoolWithMethods(descriptor_pool.Default()))
    reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server, pool)
