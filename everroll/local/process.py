"""One child process: what to run, started with its output in a file, and stopped within bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everroll.local.identity import ProcessIdentity, identify

_LAUNCHER = Path(__file__).with_name("launch.py")
_MAX_LOG_BYTES = 64 * 1024 * 1024


class ReadyCheck(Protocol):
    """Tells whether a process serves."""

    async def is_ready(self, pid: int) -> bool:
        """Ask once; within seconds, and without raising when nothing answers."""
        ...


class RunningChild(Protocol):
    """A process of the supervisor's, however it was started."""

    @property
    def identity(self) -> ProcessIdentity: ...

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal. Its whole group is gone then."""
        ...

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to the group when that takes too long."""
        ...


@dataclass(frozen=True)
class Preload:
    """A process that imports ahead what several have in common, and that they are forks of."""

    name: str
    cwd: Path
    """Where modules are found, besides those that are installed."""
    env: dict[str, str] = field(default_factory=dict, hash=False)
    """What must be set before they are imported."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process of the stack, as data."""

    name: str
    argv: tuple[str, ...]
    ready: ReadyCheck
    stage: int
    """Stages start one after the other, and stop in reverse; processes of one stage start together."""
    cwd: Path
    early_stage: int | None = None
    """It is started with this earlier stage already, and waits by itself for what it needs of those in between: it
    loads while they do."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the supervisor's environment."""
    preload: Preload | None = None
    """What it may be a fork of; `argv` is then `python -m MODULE ...`."""
    modules: tuple[str, ...] = ()
    """What takes long to import, and is to be there when it is forked."""
    niceness: int = 0
    """Added to the supervisor's: where processors are short, what has less comes first."""
    address: str = ""
    """Where it listens, for people."""
    ready_timeout_seconds: float = 60.0
    stop_timeout_seconds: float = 15.0
    """From SIGTERM to SIGKILL."""


class Child:
    """A running process that leads its own process group."""

    def __init__(
        self, process: asyncio.subprocess.Process, identity: ProcessIdentity, stop_timeout_seconds: float
    ) -> None:
        self._process = process
        self._stop_timeout_seconds = stop_timeout_seconds
        self.identity = identity

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        cwd: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
        stop_timeout_seconds: float = 15.0,
        niceness: int = 0,
    ) -> Child:
        """Start a program; its output is appended to `log`, `env` and `niceness` are added to this process's own."""
        begin_log(log, argv)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *launch_with_parent(*argv, niceness=niceness),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                process_group=0,
            )
        # A process that has ended by now is told by `wait`; its identity then matches nothing.
        identity = identify(process.pid) or ProcessIdentity(pid=process.pid, started="ended")
        return cls(process, identity, stop_timeout_seconds)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal. Its whole group is gone then."""
        code = await self._process.wait()
        kill_group(self.identity.pid)
        return code

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to the group when that takes too long."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self._stop_timeout_seconds)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        kill_group(self.identity.pid)


def launch_with_parent(*argv: str, niceness: int = 0) -> list[str]:
    """The command that runs this one so that it dies with the calling process."""
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), str(niceness), *argv]


def kill_group(leader: int) -> None:
    """End what a process has left behind in its group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def describe_exit(code: int) -> str:
    """`ended with exit code 1`, `killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def begin_log(log: Path, argv: Sequence[str]) -> None:
    """A line that says what is started. An overlong log is set aside, so that two files at most are kept."""
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    with log.open("ab") as output:
        output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())


def read_log_tail(log: Path, max_lines: int = 20) -> str:
    """The last lines of a log, for a message about a process that failed."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-max_lines:])
