"""Each way a connection can fail gives the httpx exception that means it: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from everroll.contracts.outcomes import CauseKind
from everroll.failures import Outcome, classify
from everroll.http_client import build_http_client
from tests.session_helpers import find_free_port

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


@contextlib.asynccontextmanager
async def serve_raw(behave: Callable[[Reader, Writer], Awaitable[None]]) -> AsyncIterator[str]:
    async def handle(reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await behave(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with build_http_client(connect_seconds=0.5, read_seconds=0.4, pool_seconds=0.4) as client:
        yield client


async def read_request(reader: Reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            head += await reader.readexactly(int(line.split(b":")[1]))
    return head


def reset(writer: Writer) -> None:
    """Close with RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def post(http: httpx.AsyncClient, url: str) -> httpx.Response:
    return await http.post(url, json={"a": 1})


async def expect(http: httpx.AsyncClient, url: str, kind: type[Exception]) -> Exception:
    with pytest.raises(kind) as caught:
        await post(http, url)
    assert type(caught.value) is kind
    return caught.value


async def test_an_answer_comes_through(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(_HEAD + b"Content-Length: 2\r\n\r\nok")
        await writer.drain()

    async with serve_raw(behave) as url:
        assert (await post(http, url)).text == "ok"


async def test_refused(http: httpx.AsyncClient) -> None:
    error = await expect(http, f"http://127.0.0.1:{find_free_port()}", httpx.ConnectError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


async def test_unknown_host(http: httpx.AsyncClient) -> None:
    await expect(http, "http://no-such-host.invalid", httpx.ConnectError)


async def test_closed_before_an_answer(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.RemoteProtocolError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


async def test_reset_before_an_answer(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        reset(writer)

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.ReadError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


async def test_reset_within_the_headers(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(_HEAD)
        await writer.drain()
        reset(writer)

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.ReadError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


@pytest.mark.parametrize("end", [reset, lambda writer: None])
async def test_cut_within_the_body(http: httpx.AsyncClient, end: Callable[[Writer], None]) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(_HEAD + b"Content-Length: 1000\r\n\r\nstart")
        await writer.drain()
        end(writer)

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.RemoteProtocolError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


async def test_never_answers(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await reader.read(100_000)
        await reader.read(100_000)

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.ReadTimeout)
    assert classify(error).cause_kind is CauseKind.TIMEOUT


async def test_stalls_within_the_body(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(_HEAD + b"Content-Length: 1000\r\n\r\nstart")
        await reader.read(100_000)

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.ReadTimeout)
    assert classify(error).cause_kind is CauseKind.TIMEOUT


async def test_no_connection_in_time(http: httpx.AsyncClient) -> None:
    """A full backlog: the system neither accepts nor refuses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        error = await expect(http, f"http://127.0.0.1:{address[1]}", httpx.ConnectTimeout)
        for filler in fillers:
            filler.close()
    assert classify(error).cause_kind is CauseKind.TIMEOUT


async def test_no_free_connection_in_the_pool() -> None:
    arrived = asyncio.Event()

    async def behave(reader: Reader, writer: Writer) -> None:
        arrived.set()
        await reader.read(100_000)
        await reader.read(100_000)

    async with serve_raw(behave) as url, build_http_client(pool_seconds=0.2, max_connections=1) as http:
        holder = asyncio.create_task(post(http, url))
        await arrived.wait()
        error = await expect(http, url, httpx.ConnectTimeout)
        holder.cancel()
    assert classify(error).cause_kind is CauseKind.TIMEOUT


async def test_kept_alive_connection_closed_between_requests(http: httpx.AsyncClient) -> None:
    """CASES A2: the second request goes out on a connection that the server gives up."""

    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(_HEAD + b"Content-Length: 2\r\n\r\nok")
        await read_request(reader)

    async with serve_raw(behave) as url:
        await post(http, url)
        error = await expect(http, url, httpx.RemoteProtocolError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


async def test_broken_gzip(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(_HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\nnot gzip!")

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.DecodingError)
    assert classify(error).outcome is Outcome.TERMINAL


async def test_answer_that_is_no_http(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.RemoteProtocolError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


async def test_broken_chunks(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)
        writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n")

    async with serve_raw(behave) as url:
        error = await expect(http, url, httpx.RemoteProtocolError)
    assert classify(error).cause_kind is CauseKind.TRANSPORT


@pytest.mark.parametrize("url", ["htp://127.0.0.1:1/", "127.0.0.1:1/path", "ftp://127.0.0.1/"])
async def test_scheme_that_cannot_work(http: httpx.AsyncClient, url: str) -> None:
    error = await expect(http, url, httpx.UnsupportedProtocol)
    assert classify(error).outcome is Outcome.TERMINAL


async def test_url_that_cannot_work(http: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.InvalidURL) as caught:
        await post(http, "http://127.0.0.1:port/")
    assert classify(caught.value).outcome is Outcome.TERMINAL


async def test_header_that_cannot_be_sent(http: httpx.AsyncClient) -> None:
    async def behave(reader: Reader, writer: Writer) -> None:
        await read_request(reader)

    async with serve_raw(behave) as url:
        with pytest.raises(httpx.LocalProtocolError) as caught:
            await http.post(url, headers={"x-key": "a\nb"})
    assert classify(caught.value).outcome is Outcome.TERMINAL


async def test_cancellation_stays_cancellation(http: httpx.AsyncClient) -> None:
    arrived = asyncio.Event()

    async def behave(reader: Reader, writer: Writer) -> None:
        arrived.set()
        await reader.read(100_000)
        await reader.read(100_000)

    async with serve_raw(behave) as url:
        call = asyncio.create_task(post(http, url))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
