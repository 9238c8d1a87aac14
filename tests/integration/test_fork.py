"""Forks: a new run from a step of another, on the real server; the trainer's records are real, its weights a line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from everroll.client import EverrollClient, RunExistsError, RunFailedError, name_person
from everroll.contracts.training import ForkOrigin, ResumeRequest
from tests.conftest import TemporalServer
from tests.integration.test_orchestration import read_status
from tests.integration.test_resume import wait_for
from tests.integration.test_steering import command
from tests.resume_helpers import RecordingSimulation, read_fates

_SECONDS = 60


async def test_a_fork_has_the_cursor_of_its_step(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """C3: the cursor belongs to the checkpoint. What ran ahead is played by the fork, under its own name."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3}, rollout={"max_staleness": 1})
    name = f"{run_name}-fork"[-60:].strip("-")
    forked = spec.model_copy(update={"run": spec.run.model_copy(update={"name": name})})
    origin = ForkOrigin(run=run_name, run_dir=str(simulation.run_dir(run_name)), step=1)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await client.result(run_name)
        original = (await read_status(client, run_name)).status
        assert original is not None
        before = list(simulation.episodes)
        words = ["fork", run_name, "--step", "1", "--set", "learning_rate=0.5", "--set", "max_staleness=0", "--name"]
        code, text = await command(temporal_server, *words, "no/name")
        assert (code, "--name no/name: a run's name has" in text) == (1, True), text
        code, text = await command(temporal_server, *words, name, "--reason", "to compare")
        assert code == 0, text
        result = await asyncio.wait_for(client.result(name), _SECONDS)
        view = await read_status(client, name)
        with pytest.raises(RunExistsError, match="exists already"):
            await client.fork(forked, origin, ResumeRequest())
    assert result.steps == 3
    assert read_fates(simulation.run_dir(name)) == {group: ["trained"] for group in range(6)}
    assert read_fates(simulation.run_dir(run_name)) == {group: ["trained"] for group in range(6)}
    played = [(request.key.run, request.key.group) for request in simulation.episodes[len(before) :]]
    assert set(played) == {(name, group) for group in range(6) if group not in original.recent_steps[0].groups}
    assert [(r.run, r.step, r.train.learning_rate) for r in simulation.trained[3:]] == [(name, 2, 0.5), (name, 3, 0.5)]
    record = simulation.directory(name).read()
    assert record is not None
    assert record.forked_from == origin
    assert record.spec.train.learning_rate == 0.5
    assert view.status is not None
    assert view.status.recent_steps[0].groups == original.recent_steps[0].groups
    assert sorted(group for step in view.status.recent_steps for group in step.groups) == list(range(6))
    assert view.status.steerings[0].action == f"forked from {run_name} at step 1"
    assert (view.status.steerings[0].by, view.status.steerings[0].reason) == (name_person(), "to compare")
    shared = simulation.run_dir(name) / "checkpoints" / "step_000001" / "weights.txt"
    assert shared.stat().st_nlink == 2


async def test_forks_that_cannot_be_had(client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path) -> None:
    """A step that is gone: the error names those that can be had. Other data (C11): it names both fingerprints."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3})
    forked = spec.model_copy(update={"run": spec.run.model_copy(update={"name": "f" + run_name[-50:]})})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await client.result(run_name)
        for step in (0, 1):
            (simulation.run_dir(run_name) / "checkpoints" / f"step_{step:06d}" / "manifest.json").unlink()
        origin = ForkOrigin(run=run_name, run_dir=str(simulation.run_dir(run_name)), step=1)
        await client.fork(forked, origin, ResumeRequest())
        with pytest.raises(RunFailedError, match=r"checkpoints of the steps 2, 3; .* can be had: 0, 2-3"):
            await asyncio.wait_for(client.result(forked.run.name), _SECONDS)
        other = spec.model_copy(update={"run": spec.run.model_copy(update={"name": "g" + run_name[-50:]})})
        simulation.dataset = simulation.dataset.model_copy(update={"fingerprint": "other"})
        await client.fork(other, origin.model_copy(update={"step": 2}), ResumeRequest())
        with pytest.raises(RunFailedError, match="its fingerprint was f and is now other"):
            await asyncio.wait_for(client.result(other.run.name), _SECONDS)
    assert not simulation.run_dir(forked.run.name).exists()
    assert not simulation.run_dir(other.run.name).exists()
    await wait_for(lambda: not list((tmp_path / "runs").glob(".tmp-*")))
