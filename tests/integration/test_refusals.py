"""Requests that cannot work are refused where they are typed: exit code 2, and nothing has changed. Real Temporal, the
command line, and run directories as the trainer writes them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everroll.cli.errors import BAD_INPUT, CommandError
from everroll.cli.main import app
from everroll.client import EverrollClient, RunFailedError, RunNotFoundError
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import PrepareRunRequest, PrepareRunResult
from everroll.failures import ConfigurationError
from tests.conftest import TemporalServer
from tests.resume_helpers import RecordingSimulation, read_fates

_SECONDS = 60


async def refused(server: TemporalServer, *arguments: str) -> str:
    """What `everroll ...` says of a request that it refuses."""
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--address", server.address])
    assert isinstance(result.exception, CommandError), result.output
    assert result.exception.exit_code == BAD_INPUT
    return str(result.exception)


async def accepted(server: TemporalServer, *arguments: str) -> None:
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--address", server.address])
    assert result.exit_code == 0, result.output + str(result.exception)


async def play(client: EverrollClient, simulation: RecordingSimulation, spec: RunSpec) -> None:
    await client.start(spec)
    await asyncio.wait_for(client.result(spec.run.name), _SECONDS)


def write_prompts(root: Path) -> Path:
    path = root / "prompts.jsonl"
    path.write_text('{"text": "?"}\n')
    return path


async def test_what_a_run_cannot_go_on_with(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = RecordingSimulation(client.temporal, tmp_path)
    prompts = write_prompts(tmp_path)
    spec = simulation.build_spec(run_name, task_queue, data={"path": str(prompts)})
    async with simulation.workers(client.temporal, task_queue):
        await play(client, simulation, spec)
        before = await client.status(run_name)
        resume = ("resume", run_name)
        text = await refused(temporal_server, *resume, "--set", "temperatur=1", "--set", "num_steps=many")
        assert "temperatur: unknown; did you mean temperature?" in text
        assert 'run.num_steps = "many": Input should be a valid integer' in text
        for values in (["num_steps=2"], ["learning_rate=0.5"], []):
            text = await refused(temporal_server, *resume, *(f"--set={value}" for value in values))
            assert "has done all its 2 steps; give it more with: --set num_steps=N" in text
        prompts.rename(tmp_path / "away.jsonl")
        text = await refused(temporal_server, *resume, "--set", "num_steps=3")
        assert f"data.path: no file {prompts}" in text
        assert "--no-file-checks" in text
        (tmp_path / "away.jsonl").rename(prompts)
        simulation.run_dir(run_name).rename(tmp_path / "elsewhere")
        text = await refused(temporal_server, *resume, "--set", "num_steps=3")
        assert "holds no run to resume: there is no run.json" in text
        (tmp_path / "elsewhere").rename(simulation.run_dir(run_name))
        assert (await client.status(run_name)).run_id == before.run_id, "nobody asked Temporal for anything"
        await accepted(temporal_server, *resume, "--set", "num_steps=3")
        result = await asyncio.wait_for(client.result(run_name), _SECONDS)
    assert result.steps == 3


async def test_fewer_steps_than_are_done_and_what_must_not_change(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Also where its directory is not looked at."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    spec = simulation.build_spec(
        run_name, task_queue, run={"num_steps": 4}, model={"path": str(tmp_path)}, data={"path": str(tmp_path / "p")}
    )
    write_prompts(tmp_path).rename(tmp_path / "p")
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nname = "{run_name}"\nnum_steps = 1\nseed = 7\noutput_dir = "{tmp_path}/runs"\n'
        f'[model]\npath = "."\n[data]\npath = "p"\n[rollout]\ngroups_per_step = 3\nagent.function = "a:b"\n'
    )
    simulation.train_gate = asyncio.Event()
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await client.stop(run_name)
        simulation.train_gate.set()
        assert (await asyncio.wait_for(client.result(run_name), _SECONDS)).stopped
        await accepted(temporal_server, "resume", run_name, "--set", "num_steps=2")
        assert (await asyncio.wait_for(client.result(run_name), _SECONDS)).steps == 2
        for options in ([], ["--no-file-checks"]):
            text = await refused(temporal_server, "resume", run_name, "--set", "num_steps=1", *options)
            assert "has done all its 2 steps" in text
        text = await refused(temporal_server, "resume", run_name, "--file", str(file), "--no-file-checks")
        assert "has done all its 2 steps" in text
        file.write_text(file.read_text().replace("num_steps = 1", "num_steps = 5"))
        text = await refused(temporal_server, "resume", run_name, "--file", str(file))
        assert "run.seed: 3 before, 7 now" in text
        assert "rollout.groups_per_step: 2 before, 3 now" in text


async def test_what_cannot_be_forked_and_a_fork_from_the_beginning(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = RecordingSimulation(client.temporal, tmp_path)
    prompts = write_prompts(tmp_path)
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 3}, data={"path": str(prompts)})
    name = f"f{run_name}"[:60].strip("-")
    fork = ("fork", run_name, "--name", name)
    async with simulation.workers(client.temporal, task_queue):
        await play(client, simulation, spec)
        for step in (0, 1):
            (simulation.run_dir(run_name) / "checkpoints" / f"step_{step:06d}" / "manifest.json").unlink()
        text = await refused(temporal_server, *fork, "--step", "1")
        assert "has checkpoints of the steps 2, 3; with its stored batches these steps can be had: 0, 2-3" in text
        text = await refused(temporal_server, *fork, "--step", "9", "--set", "num_steps=20")
        assert "cannot be forked at step 9: it is at step 3" in text
        text = await refused(temporal_server, *fork, "--step", "2", "--set", "learning_rte=1")
        assert "learning_rte: unknown; did you mean learning_rate?" in text
        text = await refused(temporal_server, *fork, "--step", "3")
        assert "has nothing to do with run.num_steps = 3; give it more with --set num_steps=N" in text
        text = await refused(temporal_server, *fork, "--step", "2", "--set", "num_steps=1")
        assert "has nothing to do with run.num_steps = 1" in text
        text = await refused(temporal_server, "fork", run_name, "--name", run_name, "--step", "2")
        assert "holds a run of this name already; choose another --name" in text
        prompts.rename(tmp_path / "away.jsonl")
        text = await refused(temporal_server, *fork, "--step", "2")
        assert f"data.path: no file {prompts}" in text
        with pytest.raises(RunNotFoundError):
            await client.status(name)
        assert not simulation.run_dir(name).exists()
        await accepted(temporal_server, *fork, "--step", "0", "--no-file-checks", "--set", "num_steps=1")
        result = await asyncio.wait_for(client.result(name), _SECONDS)
    assert result.steps == 1
    assert read_fates(simulation.run_dir(name)) == {0: ["trained"], 1: ["trained"]}
    assert [(request.run, request.step) for request in simulation.trained[3:]] == [(name, 1)]


async def test_a_fork_that_was_refused_by_a_worker_leaves_its_name_free(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """As a run that starts: until it has a directory, and then the text says how to go on."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    spec = simulation.build_spec(run_name, task_queue, run={"num_steps": 2})
    prepare, faults = simulation.preflight, ["no engine there", "no engine there"]
    assert prepare is not None

    async def check(request: PrepareRunRequest) -> PrepareRunResult:
        if request.fork is not None and faults:
            raise ConfigurationError(faults.pop())
        return await prepare(request)

    simulation.preflight = check
    name = f"f{run_name}"[:60].strip("-")
    fork = ("fork", run_name, "--step", "1", "--name", name)
    async with simulation.workers(client.temporal, task_queue):
        await play(client, simulation, spec)
        for _ in range(2):
            await accepted(temporal_server, *fork)
            with pytest.raises(RunFailedError, match="no engine there"):
                await asyncio.wait_for(client.result(name), _SECONDS)
            text = await refused(temporal_server, "resume", name)
            assert "holds no run to resume" in text
        await accepted(temporal_server, *fork)
        assert (await asyncio.wait_for(client.result(name), _SECONDS)).steps == 2
        assert "choose another --name" in await refused(temporal_server, *fork)


async def test_what_is_asked_of_a_run_that_has_ended(
    temporal_server: TemporalServer, client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    """Refused alike, with how and when it ended."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    async with simulation.workers(client.temporal, task_queue):
        await play(client, simulation, simulation.build_spec(run_name, task_queue))
        closed = (await client.status(run_name)).closed_at
        assert closed is not None
        ended = f"run {run_name} has ended: completed at {closed:%Y-%m-%d %H:%M:%S} UTC, see everroll status {run_name}"
        for words in (["cancel"], ["stop"], ["pause"], ["set", "top_p=0.5"], ["skip", "1"]):
            assert await refused(temporal_server, words[0], run_name, *words[1:]) == ended
        assert "no run named 'nobody'" in await refused(temporal_server, "cancel", "nobody")
        simulation.held_from = 0
        other = f"c{run_name}"[:60].strip("-")
        await client.start(simulation.build_spec(other, task_queue))
        await accepted(temporal_server, "cancel", other)
        with pytest.raises(RunFailedError, match="Cancelled"):
            await asyncio.wait_for(client.result(other), _SECONDS)
        text = await refused(temporal_server, "cancel", other)
        assert f"run {other} has ended: canceled at 20" in text
        assert f"it goes on with: everroll resume {other}" in text
