"""How the supervisor's processes are started: from nothing, or as forks of one that has imported what they need."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from everroll.local.forks import ForkError, ForkServer
from everroll.local.process import Child, Preload, ProcessSpec, RunningChild


class Starter(Protocol):
    """Starts processes for a supervisor."""

    async def prepare(self, specs: Iterable[ProcessSpec]) -> None:
        """Called once, before any is started."""
        ...

    async def start(self, spec: ProcessSpec, log: Path) -> RunningChild:
        """Start it; its output is appended to `log`.

        Raises:
            OSError: it cannot be started.
        """
        ...

    async def close(self) -> None:
        """Called once, when all have been stopped."""
        ...


class LocalStarter:
    """Forks where the system can and the process allows it.

    macOS has `fork`, too, but its libraries do not bear it.
    """

    def __init__(self, logs: Path, report: Callable[[str], None]) -> None:
        self._logs = logs
        self._report = report
        self._servers: dict[Preload, ForkServer] = {}

    async def prepare(self, specs: Iterable[ProcessSpec]) -> None:
        """The servers begin to import, in the order of the processes."""
        modules: dict[Preload, dict[str, None]] = {}
        for spec in specs if sys.platform == "linux" else ():
            if spec.preload is not None:
                modules.setdefault(spec.preload, {}).update(dict.fromkeys(spec.modules))
        for preload, names in modules.items():
            self._servers[preload] = ForkServer(preload, list(names), self._logs / f"{preload.name}.log")
        await asyncio.gather(*(server.open() for server in self._servers.values()))

    async def start(self, spec: ProcessSpec, log: Path) -> RunningChild:
        server = None if spec.preload is None else self._servers.get(spec.preload)
        if server is not None:
            try:
                return await server.start(spec, log)
            except ForkError as error:
                self._report(f"{spec.name} is not forked ({error}); it is started from nothing")
        return await Child.start(spec.argv, spec.cwd, log, spec.env, spec.stop_timeout_seconds, spec.niceness)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers.values()))
