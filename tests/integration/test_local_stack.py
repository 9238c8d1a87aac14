"""The local stack with real processes: restarts, and nothing left behind however the supervisor ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from everroll.local.control import stop_stack
from everroll.local.identity import is_running
from everroll.local.process import ProcessSpec
from everroll.local.readiness import HttpReady
from everroll.local.state import ProcessPhase, ProcessState, StackDirectory, StackError, StackPhase
from everroll.local.supervisor import Supervisor
from tests.local_helpers import (
    is_any_running,
    is_up,
    kill,
    process_of,
    supervisor,
    wait_for,
    wait_for_state,
)


@pytest.fixture
def directory(tmp_path: Path) -> StackDirectory:
    return StackDirectory(tmp_path / "stack")


def test_killed_process_is_restarted_and_shown(directory: StackDirectory) -> None:
    with supervisor(directory, "first=0", "second=0") as process:
        before = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        kill(process_of(before, "second"))
        after = wait_for_state(directory, lambda state: process_of(state, "second").restarts == 1)
        assert process_of(after, "second").last_exit == "killed by SIGKILL"
        after = wait_for_state(directory, lambda state: is_up(state, "second"))
        assert process_of(after, "second").identity != process_of(before, "second").identity
        assert process_of(after, "first") == process_of(before, "first")
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert "second killed by SIGKILL; starting it again" in output
    assert process.returncode == 0
    assert not is_any_running(after)
    assert directory.read_state() is None


def test_process_restarts_at_its_address(directory: StackDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with supervisor(directory, f"only={port}"):
        state = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        kill(process_of(state, "only"))
        wait_for_state(directory, lambda state: process_of(state, "only").restarts == 1 and is_up(state, "only"))
        assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux only")
def test_no_process_outlives_a_killed_supervisor(directory: StackDirectory) -> None:
    with supervisor(directory, "first=0", "forked=0") as process:
        state = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        process.kill()
        process.wait(timeout=60)
        wait_for(lambda: not is_any_running(state))
        assert directory.read_running_state() is None
        assert not stop_stack(directory)
        assert directory.read_state() is None


def test_crash_loop_ends_with_the_tail_of_the_log(directory: StackDirectory) -> None:
    with supervisor(directory, "first=0", "broken=0") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.count("broken ended with exit code 1; starting it again") == 2
    assert "does not come up" in output
    assert "this one is broken" in output.partition("does not come up")[2]
    assert not directory.is_locked()
    assert directory.read_state() is None


def test_what_is_misconfigured_is_not_started_again(directory: StackDirectory) -> None:
    with supervisor(directory, "first=0", "misconfigured=0") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "starting it again" not in output
    assert "there is no such renderer" in output


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")
def test_forks_outlive_neither_their_server_nor_a_restart(directory: StackDirectory) -> None:
    """What forks are made of may be killed as well: a new one is made, and they come back at their addresses."""
    with supervisor(directory, "plain=0", "forked-1=0", "forked-2=0"):
        before = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        servers = {parent_of(process_of(before, name)) for name in ("forked-1", "forked-2")}
        assert len(servers) == 1
        assert before.supervisor.pid not in servers
        os.kill(servers.pop(), signal.SIGKILL)
        names = ("forked-1", "forked-2")
        after = wait_for_state(
            directory, lambda state: all(process_of(state, name).restarts and is_up(state, name) for name in names)
        )
        assert not any(is_running(identity) for name in names if (identity := process_of(before, name).identity))
        assert process_of(after, "plain") == process_of(before, "plain")


def parent_of(process: ProcessState) -> int:
    assert process.identity is not None
    return int(Path(f"/proc/{process.identity.pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True)
class FileThere:
    path: Path

    async def is_ready(self, pid: int) -> bool:
        return self.path.exists()


@pytest.mark.parametrize("early_stage", [0, 1])
async def test_what_starts_early_loads_while_an_earlier_stage_does(tmp_path: Path, early_stage: int) -> None:
    """The first stage serves only once the process of the last has begun: in turn, neither would. Without a model the
    stage that workers begin with is empty."""
    write = (sys.executable, "-c", "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(600)")
    sleep = (sys.executable, "-c", "import time; time.sleep(600)")
    ready = FileThere(tmp_path / "begun")
    specs = [
        ProcessSpec(name="slow", argv=sleep if early_stage == 0 else write, ready=ready, stage=0, cwd=tmp_path),
        ProcessSpec(name="early", argv=write, ready=ready, stage=2, early_stage=early_stage, cwd=tmp_path),
    ]
    supervisor = Supervisor(specs, tmp_path, print, lambda: None)
    try:
        await asyncio.wait_for(supervisor.start(), 60)
        assert [keeper.state.phase for keeper in supervisor.keepers] == [ProcessPhase.HEALTHY] * 2
    finally:
        await supervisor.stop()


def test_taken_port_is_replaced(directory: StackDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with supervisor(directory, f"only={port}"):
            state = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
            assert is_up(state, "only")


async def test_stranger_on_the_port_is_not_taken_for_the_process(directory: StackDirectory) -> None:
    """A health check that another process answers is no sign of health."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with supervisor(directory, f"only={port}"):
        state = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        server = process_of(state, "only").identity
        assert server is not None
        ready = HttpReady(f"http://127.0.0.1:{port}/")
        assert await ready.is_ready(server.pid)
        assert not await ready.is_ready(os.getpid())


def test_second_supervisor_is_refused(directory: StackDirectory) -> None:
    with supervisor(directory, "only=0") as process:
        wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        with supervisor(directory, "only=0") as second:
            output, _ = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"already (pid {process.pid})" in output
        with pytest.raises(StackError, match="already"), directory.lock():
            pass


def test_down_stops_everything_and_waits(directory: StackDirectory) -> None:
    with supervisor(directory, "first=0", "second=0") as process:
        state = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        assert stat.S_IMODE(directory.state_file.stat().st_mode) == 0o600
        assert stop_stack(directory)
        assert not is_any_running(state)
        assert not is_running(state.supervisor)
        assert process.wait(timeout=60) == 0
        assert not stop_stack(directory)


def test_down_spares_a_stranger_with_the_same_pid(directory: StackDirectory) -> None:
    with supervisor(directory, "only=0") as process:
        state = wait_for_state(directory, lambda state: state.phase is StackPhase.HEALTHY)
        process.kill()
        process.wait(timeout=60)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0) as stranger:
        identity = state.supervisor.model_copy(update={"pid": stranger.pid})
        stale = process_of(state, "only").model_copy(update={"identity": identity})
        directory.write_state(state.model_copy(update={"processes": [stale]}))
        stop_stack(directory)
        assert stranger.poll() is None
        stranger.communicate(b"\n", timeout=60)


def everroll(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everroll.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.slow  # test_end_to_end.py brings the same stack up, uses it and takes it down
def test_up_and_down_of_the_real_stack(tmp_path: Path) -> None:
    """Temporal and the workers, without a model; the whole stack with one is what `everroll demo` runs."""
    directory = StackDirectory(tmp_path / ".everroll")
    try:
        up = everroll("up", "--detach", cwd=tmp_path)
        assert up.returncode == 0, up.stdout + up.stderr
        assert "The stack is up." in up.stdout
        state = directory.read_running_state()
        assert state is not None
        names = ["temporal", "worker-workflows", "worker-rollout", "worker-trainer"]
        assert [process.name for process in state.processes if is_up(state, process.name)] == names
        assert state.addresses.ui_url is not None
        assert httpx.get(state.addresses.ui_url, trust_env=False, follow_redirects=True).status_code == 200

        again = everroll("up", cwd=tmp_path)
        assert again.returncode == 1
        assert "runs in" in again.stderr

        unknown = everroll("status", "nobody", cwd=tmp_path)
        assert unknown.returncode == 2
        assert "no run named 'nobody'" in unknown.stderr

        kill(process_of(state, "worker-rollout"))
        wait_for_state(directory, lambda state: process_of(state, "worker-rollout").restarts == 1)
        wait_for_state(directory, lambda state: is_up(state, "worker-rollout"))
    finally:
        down = everroll("down", cwd=tmp_path)
    assert down.returncode == 0, down.stdout + down.stderr
    assert not is_any_running(state)
    assert not is_running(state.supervisor)


@pytest.mark.parametrize(("is_taken", "code"), [(True, 1), (False, 2)])
def test_a_taken_address_is_no_mistake_in_the_call(tmp_path: Path, is_taken: bool, code: int) -> None:
    """Exit code 2 ends the stack at once; an address is free again when whoever has it ends, and is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if is_taken else 0
        model = tmp_path if is_taken else tmp_path / "missing"
        ended = everroll("engine", "--model-path", str(model), "--port", str(port), cwd=tmp_path)
    assert ended.returncode == code
    assert ("cannot listen on" if is_taken else "no such directory") in ended.stderr
