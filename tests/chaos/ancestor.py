"""The process that has imported everything and that all stacks of this process are forks of; started when needed."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everroll.local.identity import ProcessIdentity, identify
from everroll.local.process import launch_with_parent
from tests.chaos.clock import Clock, open_clock

_START_SECONDS = 300.0


class Ancestor:
    """Use `find_ancestor`."""

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="everroll-chaos-clock-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        self.clock: Clock | None = open_clock(Path(directory))
        """Of all that descends from it."""
        clock = {} if self.clock is None else self.clock.environment
        self._process = subprocess.Popen(
            launch_with_parent(sys.executable, "-m", "tests.chaos.zygote"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **clock},
            cwd=Path(__file__).resolve().parents[2],
        )
        self._number = 0
        self._pending = b""

    def start(
        self, module: str, arguments: Sequence[str], cwd: Path, log: Path, env: Mapping[str, str] | None = None
    ) -> ProcessIdentity:
        """`python -m MODULE ARGUMENTS` as a fork; it dies with this process."""
        self._number += 1
        wanted = {
            "number": self._number,
            "modules": [],
            "argv": [sys.executable, "-m", module, *arguments],
            "cwd": str(cwd),
            "log": str(log),
            "env": dict(env or {}),
            "niceness": 0,
        }
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), json.dumps(wanted).encode() + b"\n")
        while (told := self._read(_START_SECONDS)).get("number") != self._number:
            pass  # of the end of an earlier one
        return identify(told["pid"]) or ProcessIdentity(pid=told["pid"], started="ended")

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        while b"\n" not in self._pending:
            readable, _, _ = select.select([self._process.stdout], [], [], seconds)
            data = os.read(self._process.stdout.fileno(), 1 << 16) if readable else b""
            assert data, f"the process that stacks are forks of does not answer (its exit code: {self._process.poll()})"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told


@functools.cache
def find_ancestor() -> Ancestor:
    return Ancestor()
