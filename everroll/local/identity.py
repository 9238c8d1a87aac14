"""Which process is meant: a pid together with the time its process started, since pids are used again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ProcessIdentity(BaseModel):
    """A process that cannot be mistaken for a later one with the same pid."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: str
    """When it started, as the system words it: ticks since boot on Linux, a date elsewhere."""


def identify(pid: int) -> ProcessIdentity | None:
    """The process that has this pid now; None if there is none, or it has ended and only waits to be reaped."""
    started = _linux_start_ticks(pid) if sys.platform == "linux" else _start_date(pid)
    return None if started is None else ProcessIdentity(pid=pid, started=started)


def is_running(identity: ProcessIdentity) -> bool:
    return identify(identity.pid) == identity


def send_signal(identity: ProcessIdentity, number: signal.Signals, *, to_group: bool = False) -> bool:
    """Signal the process (or the process group that it leads); false if it no longer runs.

    Raises:
        PermissionError: it belongs to another user.
    """
    if not is_running(identity):
        return False
    try:
        if to_group:
            os.killpg(identity.pid, number)
        else:
            os.kill(identity.pid, number)
    except ProcessLookupError:
        return False
    return True


def _linux_start_ticks(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the command's name, is in parentheses and may hold anything; the state is the field after it.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _start_date(pid: int) -> str | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.split(maxsplit=1)
    return None if len(answer) < 2 or answer[0].startswith("Z") else answer[1].strip()
