"""Stop a stack, or start one detached, from another process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from everroll.local.identity import ProcessIdentity, is_running, send_signal
from everroll.local.process import read_log_tail
from everroll.local.state import StackDirectory, StackError, StackPhase

_STOP_SECONDS = 90.0
"""Above the sum of what the stages may take."""
_KILL_SECONDS = 10.0
_START_SECONDS = 600.0
_POLL_SECONDS = 0.05


def stop_stack(directory: StackDirectory) -> bool:
    """Stop the stack of `directory` and wait until none of its processes is left; false if none ran.

    Raises:
        StackError: it does not end.
    """
    was_running = directory.is_locked()
    state = directory.read_state()
    if was_running and state is None:
        raise StackError(f"a stack is just being started in {directory.root}; try again in a moment")
    if state is None:
        return False
    if was_running:
        _stop_supervisor(directory, state.supervisor)
    for process in state.processes:
        if process.identity is not None:
            # Normally gone with the supervisor; the identity keeps a stranger with the same pid safe.
            send_signal(process.identity, signal.SIGKILL, to_group=True)
    directory.state_file.unlink(missing_ok=True)
    return was_running


def _stop_supervisor(directory: StackDirectory, supervisor: ProcessIdentity) -> None:
    send_signal(supervisor, signal.SIGTERM)
    if _wait(lambda: not is_running(supervisor), _STOP_SECONDS):
        return
    send_signal(supervisor, signal.SIGKILL)
    if not _wait(lambda: not is_running(supervisor), _KILL_SECONDS):
        raise StackError(f"the stack in {directory.root} (pid {supervisor.pid}) does not end")


def start_detached(directory: StackDirectory, arguments: Sequence[str]) -> str:
    """Run `everroll up ARGUMENTS` in the background; returns what it reported until the stack was healthy.

    Raises:
        StackError: it did not come up; the text holds what it reported.
    """
    directory.create()
    log = directory.logs / "supervisor.log"
    with log.open("ab") as output:
        begin = output.tell()
        command = [sys.executable, "-m", "everroll.cli", "up", "--dir", str(directory.root), *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        came_up = _wait(lambda: _is_healthy(directory, process.pid) or process.poll() is not None, _START_SECONDS)
    except BaseException:
        process.terminate()
        raise
    if process.poll() is not None:
        raise StackError(log.read_bytes()[begin:].decode(errors="replace").rstrip())
    if not came_up:
        process.terminate()
        raise StackError(f"the stack was not up within {_START_SECONDS:.0f} s:\n{read_log_tail(log)}")
    return log.read_bytes()[begin:].decode(errors="replace").rstrip()


def _is_healthy(directory: StackDirectory, pid: int) -> bool:
    state = directory.read_state()
    return state is not None and state.supervisor.pid == pid and state.phase is StackPhase.HEALTHY


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
