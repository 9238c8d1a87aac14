"""Children of a supervisor that are forks (`tests.chaos.zygote`), in place of programs that start from nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from everroll.local.identity import ProcessIdentity, identify
from tests.chaos.zygote import fork_server

_START_SECONDS = 120.0


class Nursery:
    """Make it before the event loop runs: it forks this process."""

    def __init__(self) -> None:
        self._pid, self._requests, self._answers = fork_server()
        self._number = 0
        self._started: dict[int, asyncio.Future[int]] = {}
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to listen to it."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._answers, "rb"))
        assert json.loads(await asyncio.wait_for(reader.readline(), _START_SECONDS)) == {"ready": True}
        self._reader = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            told = json.loads(line)
            if "pid" in told:
                self._ended[told["pid"]] = asyncio.get_running_loop().create_future()
                self._started.pop(told["number"]).set_result(told["pid"])
            else:
                self._ended[told["ended"]].set_result(told["code"])

    async def start_child(
        self,
        argv: Sequence[str],
        cwd: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
        stop_timeout_seconds: float = 15.0,
    ) -> ForkedChild:
        """As `everroll.local.process.Child.start`."""
        with log.open("ab") as output:
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
        self._number += 1
        started = asyncio.get_running_loop().create_future()
        self._started[self._number] = started
        wanted = {
            "number": self._number,
            "argv": list(argv),
            "cwd": str(cwd),
            "log": str(log),
            "env": dict(env or {}),
            "parent": self._pid,
        }
        os.write(self._requests, json.dumps(wanted).encode() + b"\n")
        pid = await asyncio.wait_for(started, _START_SECONDS)
        return ForkedChild(pid, self._ended[pid], stop_timeout_seconds)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class ForkedChild:
    """As `everroll.local.process.Child`."""

    def __init__(self, pid: int, ended: asyncio.Future[int], stop_timeout_seconds: float) -> None:
        self.identity = identify(pid) or ProcessIdentity(pid=pid, started="ended")
        self._ended = ended
        self._stop_timeout_seconds = stop_timeout_seconds

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._ended], timeout=self._stop_timeout_seconds)
        if not done:
            self._signal(signal.SIGKILL)
            await asyncio.wait([self._ended], timeout=self._stop_timeout_seconds)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            try:
                os.kill(self.identity.pid, number)
            except ProcessLookupError:
                return
