"""Small stand-in processes for a local stack, and a program that supervises them as `everroll up` does its own.

`python -m tests.local_helpers DIRECTORY NAME=PORT ...` runs one HTTP server for each name until it is told to end; a
port of 0 asks for any. A name that begins with `broken` ends at once with an error, with `misconfigured` as a command
does that was called wrongly; `forked` is a fork of a process that has imported the server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from everroll.local.identity import is_running
from everroll.local.ports import PortReservations
from everroll.local.process import Preload, ProcessSpec
from everroll.local.readiness import HttpReady
from everroll.local.restarts import RestartPolicy
from everroll.local.signals import InterruptedBySignalError, run_interruptibly
from everroll.local.stack import LocalStack, run_stack
from everroll.local.state import ProcessPhase, ProcessState, StackAddresses, StackDirectory, StackError, StackState

ADDRESSES = StackAddresses(temporal_address="127.0.0.1:1", task_queue="test", store_url="unused")
_QUICK = RestartPolicy(first_delay_seconds=0.05, max_failed_starts=3)


def plan_http_server(name: str, port: int, cwd: Path, stage: int = 0) -> ProcessSpec:
    """A real HTTP server that serves an empty directory, or a program that fails."""
    server = (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1")
    broken = (sys.executable, "-c", "raise SystemExit('this one is broken')")
    misconfigured = (sys.executable, "-c", "print('there is no such renderer'); raise SystemExit(2)")
    argv = {"broken": broken, "misconfigured": misconfigured}.get(name, server)
    return ProcessSpec(
        name=name,
        argv=argv,
        ready=HttpReady(f"http://127.0.0.1:{port}/"),
        stage=stage,
        cwd=cwd,
        preload=Preload("preloaded", cwd) if name.startswith("forked") else None,
        modules=("http.server",),
        stop_timeout_seconds=5,
    )


async def supervise(directory: StackDirectory, services: Sequence[tuple[str, int]]) -> None:
    """Run the stand-ins until one fails for good or this process is told to end."""
    directory.create()
    with directory.lock(), PortReservations(directory.root / "ports") as ports:
        specs = [
            plan_http_server(name, ports.choose(port), directory.root, stage)
            for stage, (name, port) in enumerate(services)
        ]
        async with run_stack(LocalStack(directory, ADDRESSES, "secret", specs, print, _QUICK)) as stack:
            await stack.watch()


@contextmanager
def supervisor(directory: StackDirectory, *services: str) -> Iterator[subprocess.Popen[str]]:
    """The program below as a process; killed at the end of the block."""
    command = [sys.executable, "-m", "tests.local_helpers", str(directory.root), *services]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Raises AssertionError when the condition is not met in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)


def wait_for_state(
    directory: StackDirectory, condition: Callable[[StackState], bool], seconds: float = 60.0
) -> StackState:
    """The first state in the state file that meets the condition."""
    found: list[StackState] = []

    def look() -> bool:
        state = directory.read_state()
        if state is not None and condition(state):
            found.append(state)
        return bool(found)

    wait_for(look, seconds)
    return found[0]


def process_of(state: StackState, name: str) -> ProcessState:
    return next(process for process in state.processes if process.name == name)


def is_up(state: StackState, name: str) -> bool:
    return process_of(state, name).phase is ProcessPhase.HEALTHY


def is_any_running(state: StackState) -> bool:
    return any(process.identity is not None and is_running(process.identity) for process in state.processes)


def kill(process: ProcessState) -> None:
    assert process.identity is not None
    os.kill(process.identity.pid, signal.SIGKILL)


def main() -> int:
    services = [(name, int(port)) for name, _, port in (text.partition("=") for text in sys.argv[2:])]
    try:
        asyncio.run(run_interruptibly(supervise(StackDirectory(Path(sys.argv[1])), services)))
    except InterruptedBySignalError:
        return 0
    except StackError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
