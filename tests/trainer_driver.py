"""A process that trains and can be killed at a chosen point; run as `python -m tests.trainer_driver`.

It imports torch once, then reads one JSON command a line and forks a child for each, so that a killed trainer costs no
second import. A child kills itself with SIGKILL when Python is about to do the file operation that the command names
(an audit hook sees it), when progress says the given words, or after so many file operations and words of progress.
After a child has ended, its exit status is printed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from pydantic import BaseModel

from everroll.contracts.spec import TrainSection
from tests.trainer_helpers import build_prepare_request, build_request
from trainer.service import Trainer

FILE_OPERATIONS = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.truncate"}


class Command(BaseModel):
    """One line of standard input."""

    root: Path
    last: int
    train: TrainSection
    kill_event: str = ""
    kill_path: str = ""
    kill_progress: str = ""
    kill_after: int = 0
    """File operations and words of progress, counted from the first step."""


def main() -> None:
    for line in sys.stdin:
        command = Command.model_validate_json(line)
        child = os.fork()
        if child == 0:
            _run_child(command)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_child(command: Command) -> None:
    try:
        _train(command)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _train(command: Command) -> None:
    torch.set_num_threads(1)
    trainer = Trainer()
    trainer.prepare(build_prepare_request(command.root, command.train))
    killer = _Killer(command)
    sys.addaudithook(killer.on_event)
    for step in range(1, command.last + 1):
        trainer.train_step(build_request(command.root, step, command.train), killer.on_progress)
    trainer.close()


class _Killer:
    def __init__(self, command: Command) -> None:
        self._command = command
        self._ticks = 0

    def on_event(self, name: str, arguments: tuple[object, ...]) -> None:
        command = self._command
        if name in FILE_OPERATIONS:
            self._tick()
        if name == command.kill_event and any(command.kill_path in str(argument) for argument in arguments[:2]):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_progress(self, text: str) -> None:
        self._tick()
        if self._command.kill_progress and self._command.kill_progress in text:
            os.kill(os.getpid(), signal.SIGKILL)

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks == self._command.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
