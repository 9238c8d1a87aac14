"""Starts modules as forks of a process that has imported everything: `python -m tests.fork_server`.

Importing torch costs seconds and is not what a test of killed processes is about. Each line of standard input is a
`Start` as JSON, answered by the child's process id, or a `Wait`, answered by its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from pydantic import BaseModel

import activities.training  # noqa: F401
import trainer.service  # noqa: F401
import worker.build  # noqa: F401


class Start(BaseModel):
    """Run a module as `python -m` does."""

    module: str
    arguments: list[str] = []
    environment: dict[str, str] = {}
    stdin: Path = Path("/dev/null")
    stdout: Path = Path("/dev/null")
    stderr: Path


class Wait(BaseModel):
    """Wait until a child has ended; it is killed when the time is up."""

    process: int
    seconds: float = 60.0


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if "module" in command:
            print(start(Start.model_validate(command)), flush=True)
        else:
            print(wait(Wait.model_validate(command)), flush=True)


def start(command: Start) -> int:
    child = os.fork()
    if child == 0:
        try:
            _run_child(command)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return child


def _run_child(command: Start) -> None:
    for number, path, flags in (
        (2, command.stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (0, command.stdin, os.O_RDONLY),
        (1, command.stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        handle = os.open(path, flags)  # a named pipe waits here for its other end
        os.dup2(handle, number)
        os.close(handle)
    os.environ.update(command.environment)
    sys.argv = [command.module, *command.arguments]
    sys.stdin = os.fdopen(0, "r")  # without what this process has read ahead
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)


def wait(command: Wait) -> int:
    deadline = time.monotonic() + command.seconds
    while True:
        ended, status = os.waitpid(command.process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(command.process, signal.SIGKILL)
            deadline += 10.0
        time.sleep(0.01)


if __name__ == "__main__":
    main()
