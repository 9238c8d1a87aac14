"""Starts trainer workers as forks of a process that has imported everything: `python -m tests.worker_fork`.

Each line of standard input is the log file of a new `python -m worker trainer`, whose process id is printed at once.
Importing torch costs seconds and is not what a test of killed workers is about.
"""

from __future__ import annotations

import os
import signal
import sys

import activities.training  # noqa: F401
import trainer.service  # noqa: F401
import worker.build  # noqa: F401
from worker.__main__ import main


def run_worker(log: str) -> None:
    """In the child: the worker, until it is told to stop or killed."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 2)
    sys.argv = ["python -m worker", "trainer"]
    os._exit(main())


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_worker(line.strip())
        print(child, flush=True)
