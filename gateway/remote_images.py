"""Fetches an image or a video by URL, without giving clients access to the gateway's own network.

A name is resolved once, and the connection is made to the address that was checked. All addresses
of the name must be public, also after each redirect. Size and time are limited. All failures have
the same message, so that a client learns nothing about the network.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import SplitResult, urljoin, urlsplit

from gateway.errors import ApiError

if TYPE_CHECKING:
    import ssl

    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Fetched = Literal["image", "video"]
MOST_REDIRECTS = 3
# A slow name server must not fill the loop's own threads, which read files.
_NAMES = ThreadPoolExecutor(8, "names")
SECONDS = 15.0  # seconds for everything together
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Public according to Python's tables, but each address leads to an IPv4 address inside it.
_TUNNELS = tuple(
    ipaddress.IPv6Network(text)
    for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)


def is_public(address: Address) -> bool:
    """Return whether an address belongs to the public internet, and not to a private network."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in tunnel for tunnel in _TUNNELS):
            return False
    return address.is_global and not address.is_multicast


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the settings for TLS. Reading the certificates of all authorities takes some 20 ms."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """A client that fetches media from public addresses only; tests allow a local server."""

    may_connect: Callable[[Address], bool] = is_public
    ports: tuple[int, ...] = (80, 443)

    async def fetch(self, url: str, largest: int, what: Fetched) -> bytes:
        """Return the bytes at a URL. Raises ApiError 400, or 413 for more than `largest` bytes."""
        import httpx  # takes a tenth of the gateway's start, and few gateways need it

        try:
            async with asyncio.timeout(SECONDS):
                verify = await asyncio.to_thread(_certificates)
                # No proxy from the environment, because it would resolve names by itself.
                async with httpx.AsyncClient(
                    verify=verify, trust_env=False, timeout=SECONDS
                ) as client:
                    return await self._follow(client, url, largest, what)
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            raise _failed(what) from None

    async def _follow(
        self, client: httpx.AsyncClient, url: str, largest: int, what: Fetched
    ) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            request = await self._request(client, urlsplit(url), what)
            response = await client.send(request, stream=True)
            try:
                if response.status_code not in _REDIRECTS:
                    return await _body(response, largest, what)
                url = urljoin(url, response.headers.get("location", ""))
            finally:
                await response.aclose()
        raise _refused(what, f"redirects more than {MOST_REDIRECTS} times")

    async def _request(
        self, client: httpx.AsyncClient, parts: SplitResult, what: Fetched
    ) -> httpx.Request:
        """Return a request to a checked address, with the host's name in its headers."""
        host, port = self._place(parts, what)
        address = await self._resolve(host, port, what)
        target = f"[{address}]" if address.version == 6 else str(address)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return client.build_request(
            "GET",
            f"{parts.scheme}://{target}:{port}{path}",
            headers={"host": parts.netloc, "accept": f"{what}/*", "accept-encoding": "identity"},
            extensions={"sni_hostname": host},
        )

    def _place(self, parts: SplitResult, what: Fetched) -> tuple[str, int]:
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _refused(what, "must begin with http:// or https:// and name a host")
        if parts.username is not None or parts.password is not None:
            raise _refused(what, "contains a user name: leave it out")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if port not in self.ports:
            raise _refused(what, f"names port {port}: only 80 and 443 are allowed")
        return parts.hostname, port

    async def _resolve(self, host: str, port: int, what: Fetched) -> Address:
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(_NAMES, look_up)
        addresses = [ipaddress.ip_address(str(entry[4][0])) for entry in found]
        # One private address among public ones is an attack, or an unreliable configuration.
        if not addresses or not all(self.may_connect(address) for address in addresses):
            raise _refused(what, "leads to an address that is not public")
        return addresses[0]


PUBLIC = Fetcher()


async def _body(response: httpx.Response, largest: int, what: Fetched) -> bytes:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A GIF also counts as a video, because many servers offer videos as GIFs.
    plain = "content-encoding" not in response.headers
    if response.status_code != 200 or not (plain and kind.startswith((f"{what}/", "image/gif"))):
        raise _failed(what)
    parts: list[bytes] = []
    length = 0
    async for part in response.aiter_raw():
        parts.append(part)
        length += len(part)
        if length > largest:
            raise too_large(largest, f"the {what}")
    return b"".join(parts)


def invalid(what: str, message: str) -> ApiError:
    return ApiError(400, message, code=f"invalid_{what}")


def too_large(largest: int, what: str) -> ApiError:
    return ApiError(
        413, f"{what} is larger than {largest} bytes: send a smaller one", code="request_too_large"
    )


def _failed(what: Fetched) -> ApiError:
    return invalid(what, f"the {what} could not be fetched from its URL")


def _refused(what: Fetched, why: str) -> ApiError:
    return invalid(what, f"the {what}'s URL {why}")
