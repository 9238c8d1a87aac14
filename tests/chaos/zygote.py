"""Processes as forks of one that has imported everything: `python -m tests.chaos.zygote`.

Importing torch costs seconds of CPU per process and is not what chaos is about. Each line of standard input asks for a
process (`Wanted`); a line of standard output answers with its pid, and another one when it has ended. Like those that
the local stack starts itself, they lead their own process groups and die with their parent.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everroll.local import launch
from everroll.local.identity import ProcessIdentity, identify
from tests.chaos.node import enter_namespace

PRELOADED = (
    "openai.resources.chat",
    "activities.training",
    "everroll.cli.main",
    "everroll.engines.embedded.assembly",
    "everroll.sessions.server",
    "trainer.service",
    "worker.build",
)
"""What the processes import, so that they find it there; not their main modules, which are run."""
NODE_VARIABLE = "EVERROLL_CHAOS_NODE"
"""Network namespace that a process enters before it becomes what it is to be."""
_LOOK_SECONDS = 0.01
_START_SECONDS = 120.0


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert importlib.import_module("transformers").Qwen3ForCausalLM  # loaded when it is first named


def serve() -> None:
    """Fork what is asked for, until standard input ends."""
    preload()
    _tell(ready=True)
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        if readable:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _fork(json.loads(line))
        _reap()


def _fork(wanted: dict[str, Any]) -> None:
    pid = os.fork()
    if pid == 0:
        _become(wanted)
    _tell(number=wanted["number"], pid=pid)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(ended=pid, code=os.waitstatus_to_exitcode(status))


def _tell(**values: object) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def _become(wanted: dict[str, Any]) -> NoReturn:
    """In the child: the program that is wanted."""
    code = 1
    try:
        os.setpgid(0, 0)
        launch.die_with_parent(wanted["parent"])
        log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(wanted["cwd"])
        os.environ.update(wanted["env"])
        if NODE_VARIABLE in os.environ:
            enter_namespace(Path(os.environ[NODE_VARIABLE]))
        argv = wanted["argv"]
        if argv[0] != sys.executable:
            os.execvp(argv[0], argv)
        assert argv[1] == "-m"
        sys.argv = [argv[2], *argv[3:]]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Zygote:
    """The program above, as a supervisor uses it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._pid = 0
        self._number = 0
        self._started: dict[int, asyncio.Future[int]] = {}
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        launcher = (sys.executable, "-I", "-S", launch.__file__, str(os.getpid()))
        self._process = await asyncio.create_subprocess_exec(
            *launcher,
            *(sys.executable, "-m", "tests.chaos.zygote"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self._pid = self._process.pid
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _START_SECONDS)
        assert json.loads(line) == {"ready": True}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
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
        assert self._process is not None
        assert self._process.stdin is not None
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
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        await self._process.stdin.drain()
        pid = await asyncio.wait_for(started, _START_SECONDS)
        return ForkedChild(pid, self._ended[pid], stop_timeout_seconds)

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()


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


if __name__ == "__main__":
    serve()
