"""A small HTTP-aware TCP proxy that breaks connections in the ways that networks do.

Each request that passes is matched against the faults that are set; one that matches is carried out, the others are
relayed byte for byte. Faults can be set and cleared while connections are open, and `break_connections` resets those
that are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum, auto

_HEAD_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 64 * 1024


class Kind(Enum):
    """What happens to a request that matches."""

    RESET_BEFORE_SERVER = auto()
    """The connection is reset before the server has seen the request."""
    RESET_AFTER_SERVER = auto()
    """The server has answered, and not one byte of it arrives."""
    RESET_IN_HEADERS = auto()
    RESET_IN_BODY = auto()
    HALF_CLOSE = auto()
    """The answer ends in the middle of its body with an orderly close."""
    CLOSE_QUIETLY = auto()
    """An orderly close instead of an answer, as when a keep-alive connection expires."""
    STALL = auto()
    """The request is taken and never answered."""
    STALL_IN_BODY = auto()
    CORRUPT = auto()
    """Bytes in the middle of the body are flipped."""
    BAD_GZIP = auto()
    """The answer claims to be gzip, and is not."""
    ANSWER = auto()
    """The proxy answers by itself, with `status` and `body`."""


@dataclass
class Fault:
    """Which requests break, and how."""

    kind: Kind
    path: str = ""
    """Part of the request's path."""
    method: str = ""
    times: int = 1
    """How many requests it hits; -1 for all."""
    status: int = 500
    body: bytes = b"broken by the proxy"
    hits: list[str] = field(default_factory=list)
    """Requests that it hit, as `METHOD path`."""

    def takes(self, method: str, path: str) -> bool:
        if self.times == 0 or self.path not in path or self.method not in ("", method):
            return False
        self.times -= 1 if self.times > 0 else 0
        self.hits.append(f"{method} {path}")
        return True


@dataclass
class _Message:
    head: bytes
    body: bytes

    @property
    def first_line(self) -> list[str]:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")


class FaultProxy:
    """Relays one port to one server. Use `run_fault_proxy`."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").rstrip("/").partition(":")
        self._upstream = (host, int(port))
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """Every request that came, as `METHOD path`."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def fault(self, kind: Kind, path: str = "", method: str = "", **values: object) -> Fault:
        """Set a fault; the first that matches wins."""
        fault = Fault(kind, path, method, **values)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    async def listen(self) -> None:
        """Take connections (again); the port stays the same."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=_MAX_HEAD_BYTES)
        self._port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Refuse new connections and reset those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.break_connections()
        await asyncio.sleep(0)

    def break_connections(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (request := await _read_message(reader)) is not None:
                await self._relay(request, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _reset(writer)
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _relay(self, request: _Message, writer: asyncio.StreamWriter) -> None:
        method, path = request.first_line[:2]
        self.requests.append(f"{method} {path}")
        fault = next((fault for fault in self.faults if fault.takes(method, path)), None)
        if fault is None:
            await _send(writer, await self._ask(request))
        else:
            await self._break(fault, request, writer)

    async def _break(self, fault: Fault, request: _Message, writer: asyncio.StreamWriter) -> None:
        if fault.kind is Kind.ANSWER:
            head = f"HTTP/1.1 {fault.status} Broken\r\ncontent-type: text/plain\r\ncontent-length: {len(fault.body)}"
            await _send(writer, _Message(head.encode() + _HEAD_END, fault.body))
        elif fault.kind is Kind.STALL:
            await writer.wait_closed()  # until the client gives up
        elif fault.kind is Kind.CLOSE_QUIETLY:
            writer.close()
        elif fault.kind is Kind.RESET_BEFORE_SERVER:
            _reset(writer)
        else:
            await self._break_answer(fault, await self._ask(request), writer)

    async def _break_answer(self, fault: Fault, answer: _Message, writer: asyncio.StreamWriter) -> None:
        half = len(answer.body) // 2
        if fault.kind is Kind.RESET_AFTER_SERVER:
            _reset(writer)
        elif fault.kind is Kind.RESET_IN_HEADERS:
            writer.write(answer.head[: len(answer.head) // 2])
            await writer.drain()
            _reset(writer)
        elif fault.kind is Kind.CORRUPT:
            flipped = bytes(byte ^ 0xFF for byte in answer.body[half : half + 16])
            await _send(writer, _Message(answer.head, answer.body[:half] + flipped + answer.body[half + 16 :]))
        elif fault.kind is Kind.BAD_GZIP:
            head = answer.head.replace(_HEAD_END, b"\r\ncontent-encoding: gzip" + _HEAD_END)
            await _send(writer, _Message(head, answer.body))
        else:
            writer.write(answer.head + answer.body[:half])
            await writer.drain()
            if fault.kind is Kind.RESET_IN_BODY:
                _reset(writer)
            elif fault.kind is Kind.HALF_CLOSE:
                writer.write_eof()  # the other direction stays open
                await writer.wait_closed()
            else:
                await writer.wait_closed()

    async def _ask(self, request: _Message) -> _Message:
        reader, writer = await asyncio.open_connection(*self._upstream, limit=_MAX_HEAD_BYTES)
        try:
            await _send(writer, request)
            answer = await _read_message(reader)
        finally:
            writer.close()
        if answer is None:
            raise ConnectionResetError("the server closed the connection")
        return answer


@contextlib.asynccontextmanager
async def run_fault_proxy(upstream: str) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(upstream)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.refuse()


async def _read_message(reader: asyncio.StreamReader) -> _Message | None:
    """One HTTP/1.1 message; None at an orderly end."""
    try:
        head = await reader.readuntil(_HEAD_END)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        return _Message(head, await _read_chunks(reader))
    return _Message(head, await reader.readexactly(int(headers.get(b"content-length", b"0"))))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if size == 0:
            return body


async def _send(writer: asyncio.StreamWriter, message: _Message) -> None:
    writer.write(message.head + message.body)
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Send RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
