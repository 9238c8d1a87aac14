"""One side of the loop alone: playing without training, and training what another run has played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from activities.collection import store_group
from everroll.audit.histories import HistoryReader
from everroll.audit.report import Findings
from everroll.audit.settlement import settle_groups
from everroll.client import EverrollClient, RunFailedError
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import TrainRequest
from everroll.runfile import RunFileError, spec_from_mapping
from tests.integration.test_orchestration import read_status
from tests.simulation import Simulation, build_spec

_NOBODY = "-nobody"
"""As a queue's suffix: no worker serves it."""


def build(tmp_path: Path, run_name: str, task_queue: str, **run: object) -> RunSpec:
    return build_spec(
        run_name,
        task_queue,
        run={"output_dir": str(tmp_path / "runs"), **run},
        services={"task_queue": task_queue, "store_url": str(tmp_path / "store")},
    )


async def play(client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path, **run: object) -> Simulation:
    """A run that only plays, without any trainer."""
    simulation = Simulation(train_queue_suffix=_NOBODY, light_activities=[store_group])
    async with simulation.workers(client.temporal, task_queue):
        await client.start(build(tmp_path, run_name, task_queue, mode="rollout", **run))
        result = await client.result(run_name)
    assert result.steps == run.get("num_steps", 2)
    return simulation


async def test_a_run_plays_and_stores_without_a_trainer(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    simulation = await play(client, run_name, task_queue, tmp_path, num_steps=3)
    assert simulation.trained == []
    assert set(simulation.published) == {0}, "the engines serve the model that the run file names"
    run_dir = tmp_path / "runs" / run_name
    requests = [
        TrainRequest.model_validate_json(path.read_bytes()) for path in sorted((run_dir / "requests").glob("*.json"))
    ]
    assert [(request.step, [item.group for item in request.batch]) for request in requests] == [
        (1, [0, 1]),
        (2, [2, 3]),
        (3, [4, 5]),
    ]
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0] == {
        "step": 1,
        "groups": [0, 1],
        "prompts": [0, 1],
        "rewards": [[0.0, 0.5], [0.0, 0.5]],
        "num_episodes": 4,
        "num_tokens": 40,
        "num_sampled_tokens": 16,
    }
    history = await HistoryReader(client.temporal, run_name).read_run()
    findings = Findings()
    account = settle_groups(history, findings)
    assert findings.breaches == []
    assert len(account.results) == 6


async def test_a_run_trains_what_another_has_played(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    await play(client, run_name, task_queue, tmp_path)
    other = f"{run_name}-t"
    simulation = Simulation(rollout_queue_suffix=_NOBODY)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(
            build(tmp_path, other, task_queue, mode="train", batches_from=str(tmp_path / "runs" / run_name))
        )
        result = await client.result(other)
        view = await read_status(client, other)
    assert (result.steps, result.trained_groups) == (2, 4)
    assert simulation.episodes == []
    assert simulation.published == []
    assert [(request.run, request.played_by) for request in simulation.trained] == [(other, run_name)] * 2
    assert [[item.group for item in request.batch] for request in simulation.trained] == [[0, 1], [2, 3]]
    assert view.status is not None
    assert [record.mean_reward for record in view.status.recent_steps] == [0.25, 0.25]
    assert [record.num_sampled_tokens for record in view.status.recent_steps] == [16, 16]
    history = await HistoryReader(client.temporal, other).read_run()
    findings = Findings()
    account = settle_groups(history, findings)
    assert findings.breaches == []
    assert sorted(account.applied) == [1, 2]


async def test_too_few_batches_are_told_before_the_first_step(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    await play(client, run_name, task_queue, tmp_path, num_steps=1)
    simulation = Simulation()
    spec = build(
        tmp_path, f"{run_name}-t", task_queue, mode="train", batches_from=str(tmp_path / "runs" / run_name), num_steps=3
    )
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        with pytest.raises(RunFailedError, match=r"no batch for step 3 .*and 1 in all"):
            await client.result(spec.run.name)
    assert simulation.trained == []


async def test_the_directory_of_another_rollout_is_not_overwritten(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path
) -> None:
    requests = tmp_path / "runs" / run_name / "requests"
    requests.mkdir(parents=True)
    spec = build(tmp_path, run_name, task_queue, mode="rollout", num_steps=1)
    foreign = TrainRequest(
        run="x", run_dir="x", step=1, seed=0, store_url="x", batch=[], model=spec.model, train=spec.train
    )
    (requests / "step_000001.json").write_text(foreign.model_dump_json())
    simulation = Simulation(light_activities=[store_group])
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        with pytest.raises(RunFailedError, match="holds another batch"):
            await client.result(run_name)


def test_a_run_file_names_both_or_none(tmp_path: Path) -> None:
    sections: dict[str, dict[str, object]] = {
        "run": {"name": "a", "num_steps": 1, "mode": "train"},
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rollout": {"agent": {"function": "a:b"}},
    }
    with pytest.raises(RunFileError, match="batches_from"):
        spec_from_mapping(sections, tmp_path, check_files=False)
    run = {**sections["run"], "batches_from": "played"}
    spec = spec_from_mapping({**sections, "run": run}, tmp_path, check_files=False)
    assert spec.run.batches_from == str(tmp_path / "played")
    section = {"every": 1, "sets": {"math": "m.jsonl"}}
    with pytest.raises(RunFileError, match=r"eval\.every"):
        spec_from_mapping({**sections, "run": run, "eval": section}, tmp_path, check_files=False)
    spec = spec_from_mapping(
        {**sections, "run": {"name": "a", "num_steps": 1}, "eval": section}, tmp_path, check_files=False
    )
    assert spec.eval.sets == {"math": str(tmp_path / "m.jsonl")}
    with pytest.raises(RunFileError, match=r"eval\.sets\.math: no file"):
        spec_from_mapping({**sections, "run": {"name": "a", "num_steps": 1}, "eval": section}, tmp_path)
