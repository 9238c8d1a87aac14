"""C1: everything is killed at once, and Temporal's database may be lost too. Real processes, a server of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everroll.audit.resumption import BY_RECORD
from everroll.cli.main import app
from everroll.client import EverrollClient
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import ForkOrigin, ResumeRequest
from everroll.local.ports import choose_port
from tests.resume_helpers import (
    HeldSimulation,
    audit_settlement,
    connect,
    count_plays,
    read_applied,
    read_fates,
    run_temporal,
    worker_process,
)
from tests.resume_trainer import TrainingSimulation
from trainer.durable import hash_file

_SECONDS = 60
NUM_PROMPTS = 12


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def num_applied(root: Path, run: str) -> int:
    return len(read_applied(root / "runs" / run))


@pytest.mark.parametrize("is_lost", [False, True], ids=["same database", "lost database"])
async def test_kill_everything(tmp_path: Path, is_lost: bool) -> None:
    """12 prompts, one a step; killed after 5 were dispatched and 3 trained. Each is settled exactly once."""
    run, queue, port = "killed", "killed", choose_port(0)
    (tmp_path / "hold").write_text("3")
    with run_temporal(tmp_path / "temporal", port) as (address, server):
        client = await connect(address)
        spec = HeldSimulation(client.temporal, tmp_path).build_spec(
            run, queue, run={"num_steps": NUM_PROMPTS}, rollout={"groups_per_step": 1, "max_staleness": 1}
        )
        with worker_process(address, queue, tmp_path) as workers:
            await client.start(spec)
            await wait_for(lambda: num_applied(tmp_path, run) == 3 and len(count_plays(tmp_path)) == 10)
            workers.kill()
            server.kill()
    before = count_plays(tmp_path)
    (tmp_path / "hold").unlink()
    with run_temporal(tmp_path / ("another" if is_lost else "temporal"), port) as (address, _):
        client = await connect(address)
        with worker_process(address, queue, tmp_path):
            if is_lost:
                run_dir = str(tmp_path / "runs" / run)
                arguments = ["resume", run, "--run-dir", run_dir, "--address", address, "--reason", "a disk died"]
                told = await asyncio.to_thread(CliRunner().invoke, app, arguments)
                assert told.exit_code == 0, told.output
            result = await asyncio.wait_for(client.result(run), _SECONDS)
            view = await client.status(run)
            fates = await audit_settlement(client, run)
    assert result.steps == NUM_PROMPTS
    assert result.trained_groups == NUM_PROMPTS
    assert read_fates(tmp_path / "runs" / run) == {group: ["trained"] for group in range(NUM_PROMPTS)}
    trained = [item.group for record in read_applied(tmp_path / "runs" / run) for item in record.batch]
    assert sorted(trained) == list(range(NUM_PROMPTS))
    again = count_plays(tmp_path) - before
    assert not any(int(session.split("-")[1]) < 3 for session in again), again
    assert view.status is not None
    assert [record.groups for record in view.status.recent_steps] == [[group] for group in trained]
    assert view.status.num_resumes == int(is_lost)
    by_record = dict.fromkeys(range(3), BY_RECORD) if is_lost else {}
    assert fates == {**dict.fromkeys(range(NUM_PROMPTS), "trained"), **by_record}


async def test_a_lost_run_is_found_and_checked(tmp_path: Path) -> None:
    """Killed between the trainer's record and the workflow's; then resumed with what must not change."""
    run, queue = "checked", "checked"
    with run_temporal(tmp_path / "temporal") as (address, server):
        client = await connect(address)
        simulation = HeldSimulation(client.temporal, tmp_path)
        simulation.train_gate = asyncio.Event()
        spec = simulation.build_spec(run, queue, run={"num_steps": 2})
        async with simulation.workers(client.temporal, queue):
            await client.start(spec)
            await wait_for(lambda: num_applied(tmp_path, run) == 1)
            server.kill()
            simulation.train_gate.set()
    with run_temporal(tmp_path / "another") as (address, _):
        client = await connect(address)
        simulation = HeldSimulation(client.temporal, tmp_path)
        async with simulation.workers(client.temporal, queue):
            told = await asyncio.to_thread(CliRunner().invoke, app, ["resume", run, "--address", address])
            assert "Temporal knows no run named 'checked'" in str(told.exception)
            other = spec.model_copy(update={"run": spec.run.model_copy(update={"seed": 5})})
            await client.start(spec)  # the name is free in the new database, the directory is not
            await expect_failure(client.result(run), "holds an earlier run of this name")
            await client.resume_ended(other, ResumeRequest(from_file=True))
            await expect_failure(client.result(run), r"run.seed: 3 before, 5 now")
            simulation.dataset = simulation.dataset.model_copy(update={"fingerprint": "other"})
            await client.resume_ended(spec, ResumeRequest())
            await expect_failure(client.result(run), "its fingerprint was f and is now other")
            simulation.dataset = simulation.dataset.model_copy(update={"fingerprint": "f"})
            await client.resume_ended(spec, ResumeRequest(changes={"num_steps": 3}))
            result = await asyncio.wait_for(client.result(run), _SECONDS)
    assert result.steps == 3
    assert [request.step for request in simulation.trained] == [2, 3]
    assert read_fates(tmp_path / "runs" / run) == {group: ["trained"] for group in range(6)}


async def expect_failure(result: object, match: str) -> None:
    from everroll.client import RunFailedError

    with pytest.raises(RunFailedError, match=match):
        await asyncio.wait_for(result, _SECONDS)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_real_trainer_after_losing_everything(tmp_path: Path) -> None:
    """Killed with workers, trainer and server in mid-step, database lost: resumed, it ends with a clean run's weights,
    bit for bit.
    """
    module, num_steps, queue = "tests.resume_trainer", 5, "trained"
    weights = []
    for name, is_killed in (("clean", False), ("killed", True)):
        root = tmp_path / name
        root.mkdir()
        with run_temporal(root / "temporal") as (address, server):
            client = await connect(address)
            spec = TrainingSimulation(client.temporal, root).build_real_spec(name, queue, num_steps)
            with worker_process(address, queue, root, module) as workers:
                if is_killed:
                    (root / "hold").write_text("9")
                await client.start(spec)
                if is_killed:
                    await wait_for(lambda root=root: num_applied(root, "killed") == 4 and played_groups(root) == 10)
                    workers.kill()
                    server.kill()
                else:
                    await asyncio.wait_for(client.result(name), 200)
        if is_killed:
            (root / "hold").unlink()
            with run_temporal(root / "another") as (address, _), worker_process(address, queue, root, module):
                client = await connect(address)
                await client.resume_ended(spec, ResumeRequest())
                result = await asyncio.wait_for(client.result(name), 200)
                assert result.trained_groups == 2 * num_steps
                await check_fork(client, spec, root)
        weights.append((root / "runs" / name / "weights" / "step_000005" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


async def check_fork(client: EverrollClient, spec: RunSpec, root: Path) -> None:
    """Of a step whose weights were let go of: from checkpoint 0 and the stored batches, the same bits."""
    source = root / "runs" / spec.run.name
    assert not (source / "weights" / "step_000002").exists()
    fork = spec.model_copy(update={"run": spec.run.model_copy(update={"name": "fork"})})
    origin = ForkOrigin(run=spec.run.name, run_dir=str(source), step=2)
    await client.fork(fork, origin, ResumeRequest(changes={"num_steps": 2}))
    result = await asyncio.wait_for(client.result("fork"), 200)
    assert (result.steps, result.trained_groups) == (2, 4)
    weights = root / "runs" / "fork" / "weights" / "step_000002" / "model.safetensors"
    assert hash_file(weights) == read_applied(source)[1].weights_sha256["model.safetensors"]


def played_groups(root: Path) -> int:
    return len({session.split("-")[1] for session in count_plays(root)}) if (root / "plays.txt").exists() else 0
