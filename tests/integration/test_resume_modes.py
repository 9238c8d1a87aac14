"""Resumed runs whose prompts a curriculum chose, and runs that only train. Real Temporal and run directories."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from activities.curriculum import CurriculumActivities
from everroll.client import EverrollClient, RunFailedError
from everroll.contracts import names
from everroll.contracts.rollout import DatasetRef
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import ForkOrigin, ResumeRequest, TrainingRunResult
from everroll.data.curriculum import Block
from everroll.prompts import DatasetCache, load_dataset
from tests.integration.test_orchestration import read_status, wait_for_status
from tests.integration.test_resume import wait_for
from tests.resume_helpers import RecordingSimulation, audit_settlement, read_applied, read_fates

_SECONDS = 60
NUM_PROMPTS = 1000
_calls = 0


def never_twice_the_same(block: Block) -> list[int]:
    """Other prompts at each call, so that a second choice for the same group is seen."""
    global _calls
    _calls += 1
    return [100 * _calls + offset for offset in range(block.num_groups)]


def another(block: Block) -> list[int]:
    return [900 + group for group in block.groups]


def build_curriculum(root: Path, client: EverrollClient) -> RecordingSimulation:
    """With the real `plan_block` over a real file of prompts."""
    global _calls
    _calls = 0
    path = root / "prompts.jsonl"
    path.write_text('{"text": "?"}\n' * NUM_PROMPTS)
    simulation = RecordingSimulation(client.temporal, root)
    simulation.dataset = DatasetRef(
        path=str(path), fingerprint=load_dataset(path).fingerprint, num_prompts=NUM_PROMPTS, seed=0, shuffle=False
    )
    plan = CurriculumActivities(DatasetCache()).plan_block
    simulation.rollout_activities = [simulation.run_episode, simulation.collect_samples, plan]
    return simulation


def build_spec(simulation: RecordingSimulation, run: str, task_queue: str, function: str) -> RunSpec:
    curriculum = {"function": f"{__name__}:{function}", "block_groups": 5}
    return simulation.build_spec(
        run,
        task_queue,
        run={"num_steps": 4},
        data={"path": str(simulation.root / "prompts.jsonl"), "curriculum": curriculum},
        rollout={"max_staleness": 1},
    )


def find_prompts(simulation: RecordingSimulation, run: str) -> dict[int, set[int | None]]:
    """What each group was given to play, all its attempts together."""
    prompts: dict[int, set[int | None]] = {}
    for request in simulation.episodes:
        if request.key.run == run:
            prompts.setdefault(request.key.group, set()).add(request.prompt_index)
    return prompts


async def result_of(client: EverrollClient, run: str) -> TrainingRunResult:
    return await asyncio.wait_for(client.result(run), _SECONDS)


@pytest.mark.parametrize("curriculum", ["never_twice_the_same", "another"])
async def test_a_resumed_run_keeps_what_its_curriculum_chose(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path, curriculum: str
) -> None:
    """Groups that were started are played again with the prompt they had. What was chosen beyond them holds too, unless
    the run goes on with another curriculum."""
    simulation = build_curriculum(tmp_path, client)
    simulation.held_from = 3
    spec = build_spec(simulation, run_name, task_queue, "never_twice_the_same")
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await wait_for(lambda: len(find_prompts(simulation, run_name)) == 6)
        await client.cancel(run_name)
        await wait_for_status(client, run_name, lambda view: view.state == "canceled")
        before = len(simulation.episodes)
        simulation.held_from = None
        goes_on = build_spec(simulation, run_name, task_queue, curriculum)
        await client.resume_ended(goes_on, ResumeRequest(from_file=True))
        result = await result_of(client, run_name)
        again = {request.key.group for request in simulation.episodes[before:]}
        name = f"f{run_name}"[:60].strip("-")
        forked = spec.model_copy(update={"run": spec.run.model_copy(update={"name": name})})
        origin = ForkOrigin(run=run_name, run_dir=str(simulation.run_dir(run_name)), step=1)
        await client.fork(forked, origin, ResumeRequest())
        await result_of(client, name)
    assert result.trained_groups == 8
    assert again >= {3, 4, 5}
    chosen = {**{group: {100 + group} for group in range(5)}, **{5 + offset: {200 + offset} for offset in range(5)}}
    if curriculum == "another":
        chosen |= {group: {900 + group} for group in range(6, 10)}
    prompts = find_prompts(simulation, run_name)
    assert prompts == {group: chosen[group] for group in prompts}
    assert sorted(prompts) == list(range(len(prompts)))
    assert set((await audit_settlement(client, run_name)).values()) <= {"trained", "dropped: surplus"}
    # The fork plays again what had only been started when its step was taken.
    assert {group: prompts[group] for group in find_prompts(simulation, name) if group < 4} == {
        group: found for group, found in find_prompts(simulation, name).items() if group < 4
    }


def start_training(simulation: RecordingSimulation, played: str, run: str, task_queue: str, num_steps: int) -> RunSpec:
    batches = str(simulation.run_dir(played))
    length = {"num_steps": num_steps, "mode": "train", "batches_from": batches}
    return simulation.build_spec(run, task_queue, run=length)


@pytest.mark.parametrize("ending", ["terminate", "cancel"])
async def test_a_run_that_only_trains_is_resumed(
    client: EverrollClient, run_name: str, task_queue: str, tmp_path: Path, ending: str
) -> None:
    """Its steps are applied once each, changed settings hold, and what is asked of it stays on one record."""
    simulation = RecordingSimulation(client.temporal, tmp_path)
    other = f"t{run_name}"[:60].strip("-")
    spec = start_training(simulation, run_name, other, task_queue, num_steps=4)
    async with simulation.workers(client.temporal, task_queue):
        await client.start(simulation.build_spec(run_name, task_queue, run={"num_steps": 4, "mode": "rollout"}))
        await result_of(client, run_name)
        published = list(simulation.published)
        simulation.train_gate = asyncio.Event()
        await client.start(spec)
        await wait_for(lambda: len(simulation.trained) == 1)
        await client.set_values(other, {"learning_rate": 0.25}, "first")
        if ending == "terminate":
            await client.temporal.get_workflow_handle(names.run_workflow_id(other)).terminate()
        else:
            await client.cancel(other)
        simulation.train_gate.set()
        await wait_for_status(client, other, lambda view: view.state != "running")
        await client.resume_ended(spec, ResumeRequest(changes={"temperature": 0.5}, by="me@here"))
        await wait_for(lambda: len(simulation.trained) >= 2)
        result = await result_of(client, other)
        view = await read_status(client, other)
        await client.resume_ended(spec, ResumeRequest(changes={"num_steps": 9}))
        with pytest.raises(RunFailedError, match=r"no batch for step 9"):
            await result_of(client, other)
    assert (result.steps, result.trained_groups) == (4, 8)
    assert simulation.published == published
    applied = read_applied(simulation.run_dir(other))
    assert [[item.group for item in record.batch] for record in applied] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    rates = {request.step: request.train.learning_rate for request in simulation.trained if request.step > 1}
    assert rates == dict.fromkeys((2, 3, 4), 0.25)
    assert view.status is not None
    assert view.status.num_resumes == 1
    lines = (simulation.run_dir(other) / "steering.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    asked = ["set", "cancel", "resumed"] if ending == "cancel" else ["set", "resumed"]
    assert [record["action"] for record in records][: len(asked)] == asked
    assert [record["number"] for record in records] == list(range(1, len(records) + 1))
    assert read_fates(simulation.run_dir(other)) == {group: ["trained"] for group in range(8)}
    await audit_settlement(client, other)
