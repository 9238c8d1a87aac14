"""Processes that are forks of one which has imported what they need are like those that start from nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from everroll.local.forks import ForkedChild
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
        preload=PRELOAD,
        modules=modules,
    )


async def end(child: RunningChild) -> int:
    return await asyncio.wait_for(child.wait(), 60)


def read_found(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{")))
    return found


async def test_a_fork_finds_what_a_process_of_its_own_finds(tmp_path: Path) -> None:
    spec = plan_probe(tmp_path, "3", modules=("tests.fork_probe", "numpy"))
    starter = LocalStarter(tmp_path, print)
    await starter.prepare([spec])
    try:
        found = []
        for number in (1, 2):
            forked = await starter.start(spec, tmp_path / f"forked-{number}.log")
            assert isinstance(forked, ForkedChild)
            assert await end(forked) == 3
            found.append(read_found(tmp_path / f"forked-{number}.log"))
        plain = await Child.start(spec.argv, spec.cwd, tmp_path / "plain.log", spec.env)
        assert await end(plain) == 3
    finally:
        await starter.close()
    expected = read_found(tmp_path / "plain.log")
    assert [item["ahead"] for item in (*found, expected)] == [True, True, False]
    for item in found:
        assert {**item, "drawn": 0, "ahead": 0} == {**expected, "drawn": 0, "ahead": 0}
    drawn = [number for item in (*found, expected) for number in item["drawn"]]
    assert len(set(drawn)) == len(drawn)
    for name in ("forked-1", "forked-2", "plain"):
        assert (tmp_path / f"{name}.log").read_text().endswith("cleaned up\n")


async def test_what_cannot_be_imported_ahead_holds_nobody_up(tmp_path: Path) -> None:
    spec = plan_probe(tmp_path, "0", modules=("everroll.no_such_module", "numpy"))
    starter = LocalStarter(tmp_path, print)
    await starter.prepare([spec])
    try:
        assert await end(await starter.start(spec, tmp_path / "probe.log")) == 0
    finally:
        await starter.close()
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
    starter = LocalStarter(tmp_path, told.append)
    await starter.prepare([spec])
    try:
        child = await starter.start(spec, tmp_path / "probe.log")
        assert isinstance(child, Child)
        assert await end(child) == 0
    finally:
        await starter.close()
    assert "it is started from nothing" in told[0]


async def test_a_fork_is_stopped_as_any_process(tmp_path: Path) -> None:
    spec = ProcessSpec(
        name="server",
        argv=(sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"),
        ready=HttpReady("http://127.0.0.1:1"),
        stage=0,
        cwd=tmp_path,
        preload=PRELOAD,
        modules=("http.server",),
    )
    starter = LocalStarter(tmp_path, print)
    await starter.prepare([spec])
    try:
        child = await starter.start(spec, tmp_path / "server.log")
        waiting = asyncio.create_task(child.wait())
        await child.stop()
        assert await asyncio.wait_for(waiting, 60) < 0
    finally:
        await starter.close()
