"""Which prompts a run plays: epochs, curricula and changed data, over kills and continue-as-new on the real server."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from activities.curriculum import CurriculumActivities
from activities.episodes import EpisodeActivities
from everroll.agents import AgentClients
from everroll.client import EverrollClient, RunFailedError
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import DatasetRef, EpisodeKey, EpisodeReport, EpisodeRequest
from everroll.data.curriculum import Block
from everroll.http_client import build_http_client
from everroll.prompts import DatasetCache, compute_prompt_index, load_dataset
from tests.integration.test_orchestration import read_status
from tests.simulation import Simulation, build_spec

NUM_PROMPTS = 8


def reversed_order(block: Block) -> list[int]:
    return [(-1 - group) % len(block.dataset) for group in block.groups]


def by_last_step(block: Block) -> list[int]:
    """The number of finished steps, as far as this function was told of them."""
    return [len(block.steps)] * block.num_groups


def refuses(block: Block) -> list[int]:
    raise ValueError("nothing left to learn")


def play(request: EpisodeRequest) -> EpisodeReport:
    """As `run_episode` finds its prompt."""
    data = request.dataset
    index = request.prompt_index
    if index is None:
        index = compute_prompt_index(request.key.group, data.num_prompts, data.seed, data.shuffle)
    return EpisodeReport(
        key=request.key, status=SampleStatus.COMPLETED, prompt_index=index, reward=request.key.member / 2
    )


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetRef:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join('{"text": "?"}\n' for _ in range(NUM_PROMPTS)))
    fingerprint = load_dataset(path).fingerprint
    return DatasetRef(path=str(path), fingerprint=fingerprint, num_prompts=NUM_PROMPTS, seed=5, shuffle=True)


def build_simulation(dataset: DatasetRef) -> Simulation:
    simulation = Simulation(play=play, dataset=dataset)
    plan = CurriculumActivities(DatasetCache()).plan_block
    simulation.rollout_activities = [simulation.run_episode, simulation.collect_samples, plan]
    return simulation


def list_prompts(simulation: Simulation) -> list[int | None]:
    """Prompts of the trained groups, in the order of training."""
    groups = [item.group for request in simulation.trained for item in request.batch]
    return [simulation.stored[group].outcomes[0].prompt_index for group in groups]


# After a kill the server waits ten seconds for the worker that knew the run.
KILLED = pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])


async def play_run(
    client: EverrollClient, simulation: Simulation, task_queue: str, run_name: str, killed: bool, **overrides: object
) -> int:
    """A whole run; `killed`: all its workers go away in the middle of group 5, and others come. Returns generations."""
    held = asyncio.Event()

    def is_gated(key: EpisodeKey) -> bool:
        if key.group == 5:
            held.set()
        return key.group == 5

    simulation.gate, simulation.is_gated = asyncio.Event(), is_gated
    await client.start(build_spec(run_name, task_queue, **overrides))
    if killed:
        async with simulation.workers(client.temporal, task_queue):
            await asyncio.wait_for(held.wait(), 60)
    simulation.gate.set()
    async with simulation.workers(client.temporal, task_queue):
        await asyncio.wait_for(client.result(run_name), 100)
        status = (await read_status(client, run_name)).status
    assert status is not None
    return status.generation


@KILLED
async def test_a_curriculum_neither_skips_nor_doubles(
    client: EverrollClient, dataset: DatasetRef, task_queue: str, run_name: str, killed: bool
) -> None:
    simulation = build_simulation(dataset)
    generations = await play_run(
        client,
        simulation,
        task_queue,
        run_name,
        killed,
        run={"num_steps": 12},
        data={"path": dataset.path, "curriculum": {"function": f"{__name__}:reversed_order", "block_groups": 5}},
        rollout={"max_staleness": 1, "heartbeat_timeout_seconds": 1},
    )
    assert generations >= 1, "the run continued as new"
    dispensed: dict[int, set[int | None]] = {}
    for request in simulation.episodes:
        dispensed.setdefault(request.key.group, set()).add(request.prompt_index)
    assert dispensed == {group: {(-1 - group) % NUM_PROMPTS} for group in range(len(dispensed))}
    trained = [item.group for request in simulation.trained for item in request.batch]
    assert len(trained) == len(set(trained)) == 24


@KILLED
async def test_epochs_are_crossed_once(
    client: EverrollClient, dataset: DatasetRef, task_queue: str, run_name: str, killed: bool
) -> None:
    """Case C2: 12 steps of 2 prompts over 8 are three epochs, each prompt once in each."""
    simulation = build_simulation(dataset)
    generations = await play_run(
        client,
        simulation,
        task_queue,
        run_name,
        killed,
        run={"num_steps": 12},
        rollout={"heartbeat_timeout_seconds": 1},
    )
    assert generations >= 1
    prompts = list_prompts(simulation)
    assert prompts == [compute_prompt_index(group, NUM_PROMPTS, 5, True) for group in range(24)]
    for epoch in range(3):
        counts = Counter(prompts[epoch * NUM_PROMPTS : (epoch + 1) * NUM_PROMPTS])
        assert counts == Counter(range(NUM_PROMPTS))


async def test_a_curriculum_may_see_the_finished_steps(
    client: EverrollClient, dataset: DatasetRef, task_queue: str, run_name: str
) -> None:
    simulation = build_simulation(dataset)
    curriculum = {"function": f"{__name__}:by_last_step", "block_groups": 2, "use_steps": True}
    spec = build_spec(run_name, task_queue, run={"num_steps": 4}, data={"path": dataset.path, "curriculum": curriculum})
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        await asyncio.wait_for(client.result(run_name), 100)
    assert list_prompts(simulation) == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_a_curriculum_that_raises_fails_the_run(
    client: EverrollClient, dataset: DatasetRef, task_queue: str, run_name: str
) -> None:
    simulation = build_simulation(dataset)
    spec = build_spec(
        run_name, task_queue, data={"path": dataset.path, "curriculum": {"function": f"{__name__}:refuses"}}
    )
    async with simulation.workers(client.temporal, task_queue):
        await client.start(spec)
        with pytest.raises(RunFailedError, match="nothing left to learn"):
            await asyncio.wait_for(client.result(run_name), 100)
    assert simulation.episodes == []


def change(path: Path) -> str:
    """Change a prompt; returns the new fingerprint."""
    path.write_text(path.read_text().replace("?", "!", 1))
    return load_dataset(path).fingerprint


async def test_a_data_set_that_changed_fails_the_run_with_both_fingerprints(
    client: EverrollClient, dataset: DatasetRef, task_queue: str, run_name: str
) -> None:
    """Case C11: the file is another one when a worker is about to play the first episode."""
    changed = change(Path(str(dataset.path)))
    simulation = build_simulation(dataset)
    async with build_http_client() as http:
        episodes = EpisodeActivities(AgentClients(http), DatasetCache(), "key")
        simulation.rollout_activities = [episodes.run_episode, simulation.collect_samples]
        async with simulation.workers(client.temporal, task_queue):
            await client.start(build_spec(run_name, task_queue))
            with pytest.raises(RunFailedError) as caught:
                await asyncio.wait_for(client.result(run_name), 100)
    assert f"its fingerprint was {dataset.fingerprint} and is now {changed}" in str(caught.value)
