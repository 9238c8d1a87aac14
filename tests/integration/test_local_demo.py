"""The demo as a newcomer runs it: it learns though a worker is killed, and leaves nothing behind when interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everroll.local.state import StackDirectory, StackPhase, StackState
from tests.local_helpers import is_any_running, kill, process_of, wait_for, wait_for_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], StackDirectory]]:
    """`everroll demo OPTIONS` as a process, and the directory of its stack."""
    command = [sys.executable, "-m", "everroll.cli", "demo", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: any(folder.glob("demo-*")))
        yield process, StackDirectory(next(folder.glob("demo-*")))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def wait_until_healthy(directory: StackDirectory) -> StackState:
    return wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY, seconds=300)


def test_demo_learns_though_the_rollout_worker_is_killed(tmp_path: Path) -> None:
    with demo(tmp_path) as (process, directory):
        state = wait_until_healthy(directory)
        second_step = directory.root / "runs" / directory.root.name / "steps" / "step_000002.json"
        wait_for(second_step.exists, seconds=200)
        kill(process_of(state, "worker-rollout"))
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    assert "worker-rollout killed by SIGKILL; starting it again" in output
    assert "The reward rose" in output
    assert not is_any_running(state)
    assert directory.read_state() is None


def test_demo_learns_though_everything_is_killed_in_turn(tmp_path: Path) -> None:
    with demo(tmp_path, "--chaos") as (process, directory):
        state = wait_until_healthy(directory)
        output, _ = process.communicate(timeout=1700)
    assert process.returncode == 0, output
    for victim in (*(process.name for process in state.processes), "everything"):
        assert f"SIGKILL  {victim} (pid" in output
        assert f"back     {victim} after" in output
    assert "The reward rose" in output
    assert "audit passed" in output
    assert not is_any_running(state)


def test_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    with demo(tmp_path) as (process, directory):
        state = wait_until_healthy(directory)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "nothing is left running" in output
    assert not is_any_running(state)
    assert directory.read_state() is None
