"""Children of a supervisor that are all forks, of a fork of the supervisor itself (`tests.chaos.zygote`)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from everroll.local.forks import Forks
from everroll.local.process import ProcessSpec, RunningChild
from tests.chaos.zygote import fork_server


class Nursery:
    """A `Starter`. Make it before the event loop runs: it forks this process."""

    def __init__(self) -> None:
        self._pid, self._requests, self._answers = fork_server()
        self._forks: Forks | None = None

    async def prepare(self, specs: Iterable[ProcessSpec]) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._answers, "rb"))
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(self._requests, "wb"))
        self._forks = Forks(reader, writer)

    async def start(self, spec: ProcessSpec, log: Path) -> RunningChild:
        assert self._forks is not None
        return await self._forks.start(dataclasses.replace(spec, modules=()), log)

    async def close(self) -> None:
        if self._forks is not None:
            await self._forks.close()

    def kill(self) -> None:
        """And with it all its forks."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
