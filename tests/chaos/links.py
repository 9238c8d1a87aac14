"""A link between two processes: a TCP relay that can be reset, stalled and cut.

It knows no protocol, so that gRPC passes too. `tests.fault_proxy` knows HTTP, and breaks single requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence

LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 5.0


class Link:
    """Relays one port to another of this machine. Use `open_link`."""

    def __init__(self, name: str, target_port: int, count: Sequence[bytes] = (), host: str = LOOPBACK) -> None:
        self.name = name
        self.host = host
        self.port = 0
        self.counts: dict[bytes, int] = dict.fromkeys(count, 0)
        """How often each of these went from client to server."""
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """host:port where it listens."""
        return f"{self.host}:{self.port}"

    async def listen(self) -> None:
        """Take connections (again); the port stays the same."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, self.host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def reset(self) -> None:
        """Send RST on every connection; new ones are taken."""
        for writer in list(self._writers):
            _reset(writer)

    def stall(self) -> None:
        """Hold every byte back, both ways, as a partition does that drops packets; new connections are taken."""
        self._flowing.clear()

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()

    async def heal(self) -> None:
        self._flowing.set()
        await self.listen()

    async def close(self) -> None:
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
        except (OSError, TimeoutError):
            self._drop(writer)
            return
        finally:
            self._tasks.discard(task)
        self._tasks.add(task)
        self._writers.add(far_writer)
        try:
            there = asyncio.ensure_future(self._pump(reader, far_writer, self._note))
            back = asyncio.ensure_future(self._pump(far_reader, writer, _ignore))
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            self._drop(writer)
            self._drop(far_writer)
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], None]
    ) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            note(data)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()

    def _note(self, data: bytes) -> None:
        for wanted in self.counts:
            self.counts[wanted] += data.count(wanted)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        """One end of the connection has gone: so does the other, at once."""
        self._writers.discard(writer)
        _reset(writer)


@contextlib.asynccontextmanager
async def open_link(
    name: str, target_port: int, count: Sequence[bytes] = (), host: str = LOOPBACK
) -> AsyncIterator[Link]:
    link = Link(name, target_port, count, host)
    await link.listen()
    try:
        yield link
    finally:
        await link.close()


def _ignore(data: bytes) -> None:
    """Answers are not counted."""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Send RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
