"""Processes as forks of one that has imported everything: `python -m tests.chaos.zygote`.

Importing torch costs seconds of CPU per process and is not what chaos is about. Each line of standard input asks for a
process; a line of standard output answers with its pid, and another one when it has ended. Like those that the local
stack starts itself, they lead their own process groups and die with their parent.

One of these, `tests.chaos.ancestor`, starts the supervisors; each supervisor has a fork of its own for its processes.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from everroll.local import launch
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


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert importlib.import_module("transformers").Qwen3ForCausalLM  # loaded when it is first named


def serve() -> None:
    """Fork what is asked for, until standard input ends."""
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


def fork_server() -> tuple[int, int, int]:
    """Fork this process into a server of forks: its pid, and the ends of the pipes to it and from it.

    Only while this process has one thread.
    """
    parent, requests, answers = os.getpid(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(requests[0])
        os.close(answers[1])
        return pid, requests[1], answers[0]
    try:
        launch.die_with_parent(parent)
        os.dup2(requests[0], 0)
        os.dup2(answers[1], 1)
        for handle in (*requests, *answers):
            os.close(handle)
        serve()
    finally:
        os._exit(0)


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
        signal.set_wakeup_fd(-1)
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    preload()
    serve()
