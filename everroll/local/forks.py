"""Children that are forks of a process which has imported what they need; see `everroll.local.fork_server`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from everroll.local.identity import ProcessIdentity, identify
from everroll.local.process import Preload, ProcessSpec, begin_log, kill_group, launch_with_parent

_FORK_SECONDS = 180.0
"""With importing what the process needs, on a busy machine."""
_END_SECONDS = 10.0


class ForkError(Exception):
    """Nothing can be forked here."""


class ForkedChild:
    """A running fork that leads its own process group; like `everroll.local.process.Child`."""

    def __init__(self, pid: int, ended: asyncio.Future[int], stop_timeout_seconds: float) -> None:
        # A process that has ended by now is told by `wait`; its identity then matches nothing.
        self.identity = identify(pid) or ProcessIdentity(pid=pid, started="ended")
        self._ended = ended
        self._stop_timeout_seconds = stop_timeout_seconds

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal. Its whole group is gone then."""
        code = await asyncio.shield(self._ended)
        kill_group(self.identity.pid)
        return code

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to the group when that takes too long."""
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._ended], timeout=self._stop_timeout_seconds)
        if not done:
            self._signal(signal.SIGKILL)
            await asyncio.wait([self._ended], timeout=_END_SECONDS)
        kill_group(self.identity.pid)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.identity.pid, number)


class _Fork(NamedTuple):
    pid: int
    ended: asyncio.Future[int]
    """Its exit code; it may have ended before anybody asks."""


def _end_unclaimed(started: asyncio.Future[_Fork]) -> None:
    """End a fork whose start was cancelled as it came. One that is still to come is ended then."""
    if started.done() and not started.cancelled() and started.exception() is None:
        kill_group(started.result().pid)


class Forks:
    """What a server of forks says and is asked, over its two pipes."""

    def __init__(self, answers: asyncio.StreamReader, requests: asyncio.WriteTransport) -> None:
        self._requests = requests
        self._number = 0
        self._started: dict[int, asyncio.Future[_Fork]] = {}
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._reader = asyncio.create_task(self._read(answers))

    async def start(self, spec: ProcessSpec, log: Path) -> ForkedChild:
        """A fork that becomes the process, once what it needs is imported.

        Raises:
            ForkError: the server ended, or does not answer.
        """
        begin_log(log, spec.argv)
        self._number += 1
        started: asyncio.Future[_Fork] = asyncio.get_running_loop().create_future()
        self._started[self._number] = started
        wanted = {
            "number": self._number,
            "modules": spec.modules,
            "argv": spec.argv,
            "cwd": str(spec.cwd),
            "log": str(log),
            "env": spec.env,
            "niceness": spec.niceness,
        }
        self._requests.write(json.dumps(wanted).encode() + b"\n")
        fork = None
        try:
            # Not `wait_for`: in Python 3.11 it swallows a cancellation that comes together with the result.
            async with asyncio.timeout(_FORK_SECONDS):
                fork = await started
        except TimeoutError as error:
            raise ForkError(f"it has not forked within {_FORK_SECONDS:g} s") from error
        finally:
            if fork is None:
                _end_unclaimed(started)
        return ForkedChild(fork.pid, fork.ended, spec.stop_timeout_seconds)

    @property
    def is_over(self) -> bool:
        """The server has ended, and its forks with it."""
        return self._reader.done()

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, answers: asyncio.StreamReader) -> None:
        try:
            async for line in answers:
                self._take(json.loads(line))
        finally:
            self._end_all()

    def _take(self, told: dict[str, int]) -> None:
        if "pid" in told:
            fork = _Fork(told["pid"], asyncio.get_running_loop().create_future())
            self._ended[fork.pid] = fork.ended
            started = self._started.pop(told["number"])
            if started.done():  # nobody waits for it any more
                kill_group(fork.pid)
            else:
                started.set_result(fork)
        else:
            self._ended.pop(told["ended"]).set_result(told["code"])

    def _end_all(self) -> None:
        error = ForkError("it has ended")
        for started in self._started.values():
            if not started.done():
                started.set_exception(error)
        for ended in self._ended.values():
            ended.set_result(-signal.SIGKILL)  # the kernel kills them with it
        self._started.clear()
        self._ended.clear()


class ForkServer:
    """A server of forks, started when it is first needed, and again when it has ended."""

    def __init__(self, preload: Preload, modules: Sequence[str], log: Path) -> None:
        self._preload = preload
        self._modules = modules
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._forks: Forks | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> Forks:
        """A server that runs; it may still be importing.

        Raises:
            OSError: it cannot be started.
        """
        async with self._lock:
            if self._forks is None or self._forks.is_over:
                await self.close()
                self._forks = await self._launch()
            return self._forks

    async def start(self, spec: ProcessSpec, log: Path) -> ForkedChild:
        """A fork of it that becomes the process.

        Raises:
            ForkError: the server ended, or does not answer.
            OSError: it cannot be started.
        """
        return await (await self.open()).start(spec, log)

    async def close(self) -> None:
        """End the server and, with it, all its forks."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        if self._forks is not None:
            await self._forks.close()
        self._process = self._forks = None

    async def _launch(self) -> Forks:
        command = [sys.executable, "-m", "everroll.local.fork_server", *self._modules]
        begin_log(self._log, command)
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *launch_with_parent(*command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                cwd=self._preload.cwd,
                env={**os.environ, **self._preload.env},
                process_group=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return Forks(self._process.stdout, self._process.stdin.transport)
