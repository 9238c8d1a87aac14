"""Processes from `tests.fork_server`, as tests use them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everroll.local.ports import choose_port
from tests.fork_server import Start, Wait

_LOG_SECONDS = 120.0


@dataclass(frozen=True)
class Forked:
    """A child of the fork server."""

    server: ForkServer
    process: int
    log: Path

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit code; minus the signal if one ended it."""
        return int(self.server.ask(Wait(process=self.process, seconds=seconds)))

    def read_until(self, pattern: str) -> str:
        """The first match in its standard error, or that match's group."""
        deadline = time.monotonic() + _LOG_SECONDS
        while not self.log.exists() or not (match := re.search(pattern, self.log.read_text())):
            text = self.log.read_text() if self.log.exists() else ""
            assert time.monotonic() < deadline, f"no line matches {pattern} in:\n{text}"
            time.sleep(0.02)
        return str(match[match.re.groups])


class ForkServer:
    """One process that has imported torch, and forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, command: Start | Wait) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command.model_dump_json() + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def start(self, module: str, arguments: Sequence[str], log: Path, **fields: object) -> Forked:
        """`python -m module arguments`, with standard error in `log`."""
        command = Start.model_validate({"module": module, "arguments": list(arguments), "stderr": log, **fields})
        return Forked(self, int(self.ask(command)), log)

    def start_ranks(self, module: str, arguments: Sequence[str], logs: Path, **fields: object) -> list[Forked]:
        """Two ranks, with the environment that torchrun gives them, but nothing that looks after them."""
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(choose_port(0))
        extra = fields.pop("environment", {})
        assert isinstance(extra, dict)
        ranks = []
        for rank in range(2):
            environment = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank), **extra}
            mine = fields if rank == 0 else {}
            log = logs.with_name(f"{logs.name}-{rank}.log")
            ranks.append(self.start(module, arguments, log, environment=environment, **mine))
        return ranks

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0
        self._process.stdout.close()


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    try:
        yield server
    finally:
        server.close()
