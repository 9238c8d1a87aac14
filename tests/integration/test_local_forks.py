"""Processes that are forks of one which has imported what they need are like those that start from nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from everroll.local.forks import ForkedChild, Forks
from everroll.local.process import Child, Preload, ProcessSpec, RunningChild
from everroll.local.readiness import HttpReady
from everroll.local.root import find_root
from everroll.local.starting import LocalStarter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

PRELOAD = Preload("preloaded", find_root())


def plan_probe(directory: Path, *arguments: str, modules: tuple[str, ...] = ("numpy",)) -> ProcessSpec:
    return ProcessSpec(
        name="probe",
        argv=(sys.executable, "-m", "tests.fork_probe", *arguments),
        ready=HttpReady("http://127.0.0.1:1"),
        stage=0,
        cwd=directory,
        env={"PYTHONPATH": str(find_root()), "EVERROLL_PROBE": "set"},
        niceness=3,
        preload=PRELOAD,
        modules=modules,
    )


@asynccontextmanager
async def open_starter(
    logs: Path, *specs: ProcessSpec, report: Callable[[str], None] = print
) -> AsyncIterator[LocalStarter]:
    starter = LocalStarter(logs, report)
    await starter.prepare(specs)
    try:
        yield starter
    finally:
        await starter.close()


async def end(child: RunningChild) -> int:
    return await asyncio.wait_for(child.wait(), 60)


def read_found(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))
    return found


async def test_a_fork_finds_what_a_process_of_its_own_finds(tmp_path: Path) -> None:
    spec = plan_probe(tmp_path, "3", modules=("tests.fork_probe", "numpy"))
    async with open_starter(tmp_path, spec) as starter:
        found = []
        for number in (1, 2):
            forked = await starter.start(spec, tmp_path / f"forked-{number}.log")
            assert isinstance(forked, ForkedChild)
            assert await end(forked) == 3
            found.append(read_found(tmp_path / f"forked-{number}.log"))
        plain = await Child.start(spec.argv, spec.cwd, tmp_path / "plain.log", spec.env, niceness=spec.niceness)
        assert await end(plain) == 3
    expected = read_found(tmp_path / "plain.log")
    assert [item["ahead"] for item in (*found, expected)] == [True, True, False]
    assert expected["niceness"] == os.nice(0) + 3
    for item in found:
        assert {**item, "drawn": 0, "ahead": 0} == {**expected, "drawn": 0, "ahead": 0}
    drawn = [number for item in (*found, expected) for number in item["drawn"]]
    assert len(set(drawn)) == len(drawn)
    for name in ("forked-1", "forked-2", "plain"):
        assert (tmp_path / f"{name}.log").read_text().endswith("cleaned up\n")


async def test_what_cannot_be_imported_ahead_holds_nobody_up(tmp_path: Path) -> None:
    spec = plan_probe(tmp_path, "0", modules=("everroll.no_such_module", "numpy"))
    async with open_starter(tmp_path, spec) as starter:
        assert await end(await starter.start(spec, tmp_path / "probe.log")) == 0
    assert "everroll.no_such_module is not imported ahead" in (tmp_path / "preloaded.log").read_text()


async def test_where_nothing_can_be_forked_it_starts_from_nothing(tmp_path: Path) -> None:
    """A module that ends the process which imports it."""
    (tmp_path / "ends_all.py").write_text("import os; os._exit(1)")
    preload = Preload("preloaded", tmp_path)
    spec = ProcessSpec(
        name="probe",
        argv=(sys.executable, "-m", "tests.fork_probe", "0"),
        ready=HttpReady("http://127.0.0.1:1"),
        stage=0,
        cwd=find_root(),
        preload=preload,
        modules=("ends_all",),
    )
    told: list[str] = []
    async with open_starter(tmp_path, spec, report=told.append) as starter:
        child = await starter.start(spec, tmp_path / "probe.log")
        assert isinstance(child, Child)
        assert await end(child) == 0
    assert "it is started from nothing" in told[0]


async def test_what_an_imported_module_leaves_behind_is_not_taken_for_a_fork(tmp_path: Path) -> None:
    """A child that has ended, and text that is not written out yet."""
    (tmp_path / "leaves_much.py").write_text(
        "import os, subprocess\n"
        "left = subprocess.Popen(['true'])\n"
        "os.waitid(os.P_PID, left.pid, os.WEXITED | os.WNOWAIT)\n"
        "print('said once')\n"
    )
    preload = Preload("preloaded", tmp_path, {"PYTHONPATH": str(find_root()), "PYTHONUNBUFFERED": ""})
    spec = dataclasses.replace(plan_probe(tmp_path, "3", modules=("leaves_much",)), preload=preload)
    async with open_starter(tmp_path, spec) as starter:
        child = await starter.start(spec, tmp_path / "probe.log")
        assert isinstance(child, ForkedChild)
        assert await end(child) == 3
    assert "said once" not in (tmp_path / "probe.log").read_text()
    assert (tmp_path / "preloaded.log").read_text().count("said once") == 1


async def test_the_end_of_a_fork_is_told_while_the_server_imports(tmp_path: Path) -> None:
    """What is asked for during one import runs, and ends, during the next."""
    for module in ("first", "second"):
        (tmp_path / f"{module}.py").write_text(
            "import pathlib, time\n"
            "deadline = time.monotonic() + 60\n"
            f"while not pathlib.Path('go-{module}').exists() and time.monotonic() < deadline:\n"
            "    time.sleep(0.01)\n"
        )
    preload = Preload("preloaded", tmp_path, {"PYTHONPATH": str(find_root())})
    specs = [
        dataclasses.replace(plan_probe(tmp_path, "3", modules=(module,)), preload=preload)
        for module in ("first", "second")
    ]
    async with open_starter(tmp_path, *specs) as starter:
        starting = asyncio.create_task(starter.start(specs[0], tmp_path / "probe.log"))
        await asyncio.sleep(0)
        (tmp_path / "go-first").touch()
        child = await asyncio.wait_for(starting, 60)
        assert await asyncio.wait_for(child.wait(), 30) == 3


def plan_server(directory: Path) -> ProcessSpec:
    return ProcessSpec(
        name="server",
        argv=(sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"),
        ready=HttpReady("http://127.0.0.1:1"),
        stage=0,
        cwd=directory,
        preload=PRELOAD,
        modules=("http.server",),
    )


async def test_who_asks_all_processes_to_end_does_not_kill_the_forks(tmp_path: Path) -> None:
    """As a service manager does: each fork ends in good order, which it could not if the server were gone."""
    spec = plan_server(tmp_path)
    async with open_starter(tmp_path, spec) as starter:
        first = await starter.start(spec, tmp_path / "first.log")
        server = parent_of(first.identity.pid)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(server, number)
        second = await starter.start(spec, tmp_path / "second.log")
        assert parent_of(second.identity.pid) == parent_of(first.identity.pid) == server
        os.kill(first.identity.pid, signal.SIGTERM)
        assert await end(first) == -signal.SIGTERM


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@asynccontextmanager
async def open_forks() -> AsyncIterator[tuple[Forks, asyncio.StreamReader]]:
    """What a server would say is said by the test, so that it comes just when it may do harm."""
    requests, ours = os.pipe()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(ours, "wb", 0))
    answers = asyncio.StreamReader()
    forks = Forks(answers, transport)
    try:
        yield forks, answers
    finally:
        await forks.close()
        transport.close()
        os.close(requests)


def begin(*command: str) -> subprocess.Popen[bytes]:
    """A process that leads a group, as a fork does."""
    return subprocess.Popen(command, process_group=0)


def say(answers: asyncio.StreamReader, **values: int) -> None:
    answers.feed_data(json.dumps(values).encode() + b"\n")


async def test_a_fork_that_ends_before_anybody_looks_has_ended(tmp_path: Path) -> None:
    """A busy supervisor reads both at once: that there is one, and how it ended."""
    process = begin("true")
    process.wait(timeout=60)
    async with open_forks() as (forks, answers):
        starting = asyncio.create_task(forks.start(plan_probe(tmp_path), tmp_path / "probe.log"))
        await asyncio.sleep(0)
        say(answers, number=1, pid=process.pid)
        say(answers, ended=process.pid, code=7)
        assert await end(await asyncio.wait_for(starting, 60)) == 7


@pytest.mark.parametrize("is_late", [True, False], ids=["before it is there", "as it comes"])
async def test_a_start_that_is_cancelled_leaves_no_fork(tmp_path: Path, is_late: bool) -> None:
    process = begin("sleep", "60")
    async with open_forks() as (forks, answers):
        starting = asyncio.create_task(forks.start(plan_probe(tmp_path), tmp_path / "probe.log"))
        await asyncio.sleep(0)
        if is_late:
            starting.cancel()
        say(answers, number=1, pid=process.pid)
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, 60)
    try:
        assert process.wait(timeout=20) == -signal.SIGKILL
    finally:
        process.kill()


async def test_a_fork_is_stopped_as_any_process(tmp_path: Path) -> None:
    spec = plan_server(tmp_path)
    async with open_starter(tmp_path, spec) as starter:
        child = await starter.start(spec, tmp_path / "server.log")
        waiting = asyncio.create_task(child.wait())
        await child.stop()
        assert await asyncio.wait_for(waiting, 60) < 0
