"""Whole stacks as forks of one process that has imported everything: `python -m tests.chaos.zygote`.

Importing torch costs seconds of CPU per process and is not what chaos is about. This is the local stack's own server of
forks (`everroll.local.fork_server`), but for all processes, the supervisor too, and on whatever node they are to be.

One of these, `tests.chaos.ancestor`, starts the supervisors; each supervisor has a fork of its own for its processes.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from everroll.local import launch
from everroll.local.fork_server import Server, Wanted, become, take_pipes
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


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert importlib.import_module("transformers").Qwen3ForCausalLM  # loaded when it is first named


def serve(requests: int, answers: int) -> None:
    """Fork what is asked for, until requests end."""
    wanted = Server(requests, answers).run()
    if wanted is not None:
        _be(wanted)


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
        os.close(requests[1])
        os.close(answers[0])
        serve(requests[0], answers[1])
    finally:
        os._exit(0)


def _be(wanted: Wanted) -> NoReturn:
    """In a fork: the program that is wanted, and no more; what this one was a fork of has frames of its own."""
    code = 1
    try:
        node = wanted["env"].get(NODE_VARIABLE)
        if node is not None:
            enter_namespace(Path(node))
        become(wanted)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    pipes = take_pipes()
    preload()
    serve(*pipes)
