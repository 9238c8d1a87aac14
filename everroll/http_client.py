"""The one HTTP client of a worker process: httpx over aiohttp, finite timeouts, the right exceptions.

The failure boundary is written in httpx's exceptions. The transport of `httpx-aiohttp` is several times faster than
httpx's own, but maps some of aiohttp's errors onto the wrong class, or not at all: a broken connection becomes
`ConnectTimeout`, a malformed answer stays an aiohttp error. `FaithfulTransport` puts that right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NoReturn

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport


class FaithfulTransport(httpx.AsyncBaseTransport):
    """`AiohttpTransport` with every error of aiohttp mapped onto the httpx class that means the same."""

    def __init__(self, inner: AiohttpTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response: httpx.Response = await self._inner.handle_async_request(request)
        except Exception as error:
            _raise_mapped(error, request, reading=False)
        response.stream = _FaithfulStream(response.stream, request)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _FaithfulStream(httpx.AsyncByteStream):
    """The body of an answer; errors while reading it are mapped too."""

    def __init__(self, inner: object, request: httpx.Request) -> None:
        assert isinstance(inner, httpx.AsyncByteStream)
        self._inner = inner
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                yield chunk
        except Exception as error:
            _raise_mapped(error, self._request, reading=True)

    async def aclose(self) -> None:
        await self._inner.aclose()


def build_http_client(
    *,
    connect_seconds: float = 5.0,
    read_seconds: float = 120.0,
    write_seconds: float = 30.0,
    pool_seconds: float = 60.0,
    max_connections: int = 512,
) -> httpx.AsyncClient:
    """A client for one event loop. Redirects are not followed and proxies of the environment not used.

    `pool_seconds` bounds the wait for a free connection and its opening together; past it, `ConnectTimeout` is raised.
    """
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=None, keepalive_expiry=15.0)
    timeout = httpx.Timeout(connect=connect_seconds, read=read_seconds, write=write_seconds, pool=pool_seconds)
    transport = FaithfulTransport(AiohttpTransport(limits=limits, trust_env=False))
    return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)


def _raise_mapped(error: Exception, request: httpx.Request, reading: bool) -> NoReturn:
    mapped = _map_error(error, request, reading)
    if mapped is error:
        raise error  # as its own cause it would be a cycle, which Temporal cannot encode
    raise mapped from error


def _map_error(error: Exception, request: httpx.Request, reading: bool) -> Exception:
    """The httpx error that says what happened; errors that are not from the transport stay as they are."""
    origin = error.__cause__ if isinstance(error, httpx.TransportError) else error
    if isinstance(origin, ValueError) and not isinstance(origin, aiohttp.ClientError) and not reading:
        return httpx.LocalProtocolError(f"the request cannot be sent: {origin}", request=request)
    if not isinstance(origin, (aiohttp.ClientError, OSError, TimeoutError)):
        return error
    kind = _classify(origin, reading)
    return error if type(error) is kind else kind(f"{type(origin).__name__}: {origin}", request=request)


def _classify(origin: BaseException, reading: bool) -> type[httpx.TransportError]:
    """The first row that fits."""
    table: list[tuple[type[BaseException], type[httpx.TransportError]]] = [
        (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
        (aiohttp.SocketTimeoutError, httpx.ReadTimeout),
        (TimeoutError, httpx.ReadTimeout),  # ServerTimeoutError among them
        (aiohttp.InvalidURL, httpx.UnsupportedProtocol),
        (aiohttp.NonHttpUrlClientError, httpx.UnsupportedProtocol),
        (aiohttp.ClientHttpProxyError, httpx.ProxyError),
        (aiohttp.ClientProxyConnectionError, httpx.ProxyError),
        (aiohttp.ClientConnectorError, httpx.ConnectError),
        (aiohttp.ServerDisconnectedError, httpx.RemoteProtocolError),  # closed before an answer
        (aiohttp.ClientPayloadError, httpx.RemoteProtocolError if reading else httpx.WriteError),
        (aiohttp.ClientResponseError, httpx.RemoteProtocolError),  # what came is no HTTP
        (aiohttp.ClientOSError, httpx.ReadError),
        (aiohttp.ClientConnectionError, httpx.ReadError),
        (aiohttp.ClientError, httpx.RemoteProtocolError),
    ]
    return next((target for source, target in table if isinstance(origin, source)), httpx.ReadError)
