"""A link between two processes: a TCP relay that can be reset, stalled and cut.

It knows no protocol, so that gRPC passes too. `tests.fault_proxy` knows HTTP, and breaks single requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import AsyncIterator, Sequence

LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 5.0
_BACKLOG = 128
_MOST_PLUGS = 64


class Link:
    """Relays one port to another of this machine. Use `open_link`."""

    def __init__(self, name: str, target_port: int, count: Sequence[bytes] = (), host: str = LOOPBACK) -> None:
        self.name = name
        self.host = host
        self.port = 0
        self.counts: dict[bytes, int] = dict.fromkeys(count, 0)
        """How often each of these went through, whichever way."""
        self._target_port = target_port
        self._listening: socket.socket | None = None
        self._plugs: list[socket.socket] = []
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
        if self._listening is None:
            self._listening = socket.create_server((self.host, self.port), backlog=_BACKLOG)
            self._listening.setblocking(False)
            self.port = self._listening.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listening, self._take, self._listening)

    def reset(self) -> None:
        """Send RST on every connection; new ones are taken."""
        for writer in list(self._writers):
            _reset(writer)

    def stall(self) -> None:
        """Hold every byte back, both ways, as a partition does that drops packets; new connections have no answer."""
        self._flowing.clear()
        self._stop_accepting()
        if self._listening is not None:
            self._listening.listen(0)
            self._plug(self._listening)

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._stop_accepting()
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self.reset()

    async def heal(self) -> None:
        self._flowing.set()
        self._unplug()
        if self._listening is not None:
            self._listening.listen(_BACKLOG)
        await self.listen()

    async def close(self) -> None:
        self._unplug()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop_accepting(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)

    def _plug(self, listening: socket.socket) -> None:
        """Fill the queue of connections that nobody takes: from then on the kernel drops what asks for one."""
        for _ in range(_MOST_PLUGS):
            plug = socket.socket()
            plug.setblocking(False)
            self._plugs.append(plug)
            plug.connect_ex(listening.getsockname())
            # One that is taken can be written to at once.
            if not select.select([], [plug], [], 0)[1]:
                return

    def _unplug(self) -> None:
        for plug in self._plugs:
            plug.close()
        self._plugs.clear()

    def _take(self, listening: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = listening.accept()
            connection.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writers.add(writer)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
        except (OSError, TimeoutError):
            self._drop(writer)
            return
        self._writers.add(far_writer)
        there = asyncio.ensure_future(self._pump(reader, far_writer))
        back = asyncio.ensure_future(self._pump(far_reader, writer))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            self._drop(writer)
            self._drop(far_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            self._note(data)
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


def _reset(writer: asyncio.StreamWriter) -> None:
    """Send RST instead of FIN."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
