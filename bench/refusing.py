"""A server that refuses every call: shows what a flood of calls costs on this machine at least.

The first argument is the port.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from wire import backend_pb2 as pb
from wire import backend_pb2_grpc


class Refusing(backend_pb2_grpc.BackendServicer):
    async def Health(self, _request: Any, _context: Any) -> pb.Reply:
        return pb.Reply(message=b"OK")

    async def Predict(self, _request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


async def serve(port: int) -> None:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    backend_pb2_grpc.add_BackendServicer_to_server(Refusing(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
