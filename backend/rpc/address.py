"""Parses the `--addr` argument, and checks that the address is free."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.launch import ROOT

_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")
# An installed wheel has no run.sh.
PROGRAM = "run.sh" if Path(ROOT, "run.sh").exists() else "mlx-backend backend"
USAGE = f"""\
usage: {PROGRAM} [--addr HOST:PORT | --version]   (default localhost:50051; [::1]:PORT: IPv6)"""
RANKS_USAGE = f"""\
       {PROGRAM} [--addr HOST:PORT] --ranks N         divide the model among N processes here
       {PROGRAM} [--addr HOST:PORT] --hostfile FILE   be rank 0 of several machines
       {PROGRAM} --worker --rank R --hostfile FILE    be another rank, one per machine"""


class UsageError(Exception):
    """The command line is invalid; `str()` is the message for the user."""


class AddressInUse(Exception):
    """Another process listens on the address."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host (IPv6 in brackets) and a port; port 0 lets the system choose."""

    host: str = "localhost"
    port: int = 50051

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not _HOST.fullmatch(host):
            raise UsageError(f"--addr {text!r} is not HOST:PORT, for example 127.0.0.1:50051")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UsageError(f"--addr {text!r} has no port from 0 to 65535 after the colon")
        return cls(host, int(port))


def address_of(arguments: Sequence[str]) -> Address:
    """Return the address on the command line. If `--addr` is repeated, the last value applies."""
    address = Address()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name != "--addr":
            raise UsageError(f"unknown argument {argument!r}; {USAGE}")
        if not equals and (value := next(rest, "")) == "":
            raise UsageError(f"--addr needs a value; {USAGE}")
        address = Address.parse(value)
    return address


def require_free(address: Address) -> None:
    """Raise AddressInUse if the port is taken on any interface that the address resolves to.

    gRPC starts even if it can bind only one of the addresses of `localhost`. The host might then
    reach the other process.
    """
    if address.port == 0:
        return
    for family, _, _, _, interface in _interfaces(address):
        try:
            socket.create_server(interface, family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"{address} is in use by another process: stop it or choose another port"
                ) from None
            if error.errno == errno.EACCES:
                raise UsageError(
                    f"no permission to listen on {address}: choose a port above 1023"
                ) from None


def _interfaces(address: Address) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return socket.getaddrinfo(  # type: ignore[return-value]
            address.host.strip("[]"), address.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise UsageError(f"cannot resolve the host of --addr {address}: {error.strerror}") from None
