"""A process that imports modules once, and then becomes others: `python -m everroll.local.fork_server MODULE ...`.

Importing torch and transformers takes seconds of processor time. A fork of a process that has done so starts at once,
and shares the memory with it. Each line of standard input asks for a process; a line of standard output answers with
its pid, and another one when it has ended. The processes lead groups of their own, and die with this one, as it does
with the supervisor. Each is forked as soon as the modules that it needs are imported.

Nothing here may start a thread or an event loop, and nothing that is imported may: a fork has only the thread that
made it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from everroll.local import launch

_NAME = Path("/proc/self/comm")
_NAME_AT_START = _NAME.read_bytes().rstrip(b"\n")
with contextlib.suppress(ImportError):  # with it, `ps` tells the processes apart
    import setproctitle

    setproctitle.getproctitle()  # it finds its place in memory now, before the environment is changed
    _NAME.write_bytes(_NAME_AT_START)

Wanted = dict[str, Any]
"""`number` of the request, `modules` that it needs, `argv`, `cwd`, `log`, and `env` and `niceness`, which are added to
the server's."""

_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a program to end. A service manager asks all processes at once; the forks shall then end in good order, as
they could not if the server did. The supervisor ends it, or the end of the requests."""


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A signal's handler, not `SIG_IGN`: programs that an imported module runs would inherit that."""


class Server:
    """Serves until the file descriptor `requests` ends; says what happens at `answers`."""

    def __init__(self, requests: int, answers: int, modules: Sequence[str] = ()) -> None:
        self._requests = requests
        self._answers = answers
        self._left = list(modules)
        self._waiting: list[Wanted] = []
        self._forks: set[int] = set()
        self._pending = b""
        self._is_open = True
        self._woken, self._wake = os.pipe()

    def run(self) -> Wanted | None:
        """Import, and fork what is asked for as soon as what it needs is there. In each fork it returns what that
        shall `become`, in the server None at the end."""
        for handle in (self._woken, self._wake):
            os.set_blocking(handle, False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in _TO_END}
        # In the middle of an import, too, which may take seconds.
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: self._reap())
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        while self._is_open:
            self._read()
            self._reap()
            for wanted in [wanted for wanted in self._waiting if not set(wanted["modules"]) & set(self._left)]:
                self._waiting.remove(wanted)
                if self._fork(wanted) == 0:
                    return wanted
            if self._left:
                preload(self._left.pop(0))
        return None

    def _read(self) -> None:
        """Wait for requests or for the end of a fork, unless there is something left to do."""
        is_busy = self._left or self._waiting
        readable, _, _ = select.select([self._requests, self._woken], [], [], 0 if is_busy else None)
        if self._woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 1 << 16)
        if self._requests not in readable:
            return
        data = os.read(self._requests, 1 << 16)
        self._is_open = bool(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._waiting += map(json.loads, lines)

    def _fork(self, wanted: Wanted) -> int:
        server = os.getpid()
        gc.freeze()  # a collection in a fork would write to, and so copy, all that is shared
        for stream in (sys.stdout, sys.stderr):  # what a module has printed would be in each fork's log, too
            stream.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _TO_END)  # a fork must not miss one before it heeds them
        pid = os.fork()
        if pid == 0:
            self._leave(server)
            return pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_END)
        with contextlib.suppress(OSError):  # it does so itself, too: whoever is first
            os.setpgid(pid, pid)
        self._tell(number=wanted["number"], pid=pid)
        self._forks.add(pid)  # not before: its end would be told first
        return pid

    def _leave(self, server: int) -> None:
        """In a fork: be a process of one's own."""
        os.setpgid(0, 0)
        launch.die_with_parent(server)
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_END)
        for handle in (self._requests, self._answers, self._woken, self._wake):
            os.close(handle)

    def _reap(self) -> None:
        """Tell of the forks that have ended. Another child is an imported module's own, which waits for it itself."""
        for pid in list(self._forks):
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # told already: a signal came in between
                continue
            if ended:
                self._forks.discard(pid)
                self._tell(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **values: object) -> None:
        os.write(self._answers, json.dumps(values).encode() + b"\n")


def become(wanted: Wanted) -> None:
    """In a fork: run the program, which is a module of Python's or takes this process's place.

    Raises:
        SystemExit: as the program does.
        OSError: its log or its directory cannot be opened.
    """
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.nice(wanted["niceness"])
    os.chdir(wanted["cwd"])
    os.environ.update(wanted["env"])
    argv = wanted["argv"]
    if argv[:2] != [sys.executable, "-m"]:
        os.execvp(argv[0], argv)
    sys.path[:0] = [wanted["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [argv[2], *argv[3:]]
    _draw_other_numbers()
    _show_as(" ".join(argv))
    runpy.run_module(argv[2], run_name="__main__", alter_sys=True)


def preload(module: str) -> None:
    """Import it if it is there; whoever needs it will say what is wrong with it."""
    try:
        importlib.import_module(module)
    except Exception as error:
        print(f"{module} is not imported ahead: {error!r}", file=sys.stderr, flush=True)


def _show_as(title: str) -> None:
    """In `ps`; the program's name, by which `top` and `killall` know it, stays."""
    if "setproctitle" in sys.modules:
        setproctitle.setproctitle(title)
        _NAME.write_bytes(_NAME_AT_START)  # it had become the title's begin


def _draw_other_numbers() -> None:
    """Two forks must not draw the same; Python's own `random` sees to it itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def take_pipes() -> tuple[int, int]:
    """Where requests come in and answers go out: what were standard input and output. What is printed from now on,
    while modules are imported, is no answer."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    return requests, answers


def main() -> None:
    wanted = Server(*take_pipes(), sys.argv[1:]).run()
    if wanted is not None:
        become(wanted)


if __name__ == "__main__":
    main()
