"""A run whose trainer worker is killed again and again, through Temporal: no episode runs twice, no bit differs.

Agent and engine are simulated, and their samples are real blobs; workflows, trainer and the server are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from activities.collection import store_group
from everroll.client import EverrollClient
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import CollectResult, EpisodeKey, SamplesRef
from everroll.contracts.training import GroupBatchItem
from everroll.store import LocalStore
from everroll.tokens.samples import SampleSet, encode_samples
from tests.conftest import TemporalServer
from tests.forked import Forked, ForkServer, fork_server
from tests.simulation import Simulation, build_spec
from tests.trainer_helpers import build_sample, save_model
from trainer.rundir import RunDirectory

NUM_STEPS = 12
GROUPS_PER_STEP = 2


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as server:
        yield server


class Run:
    """One run, with rollouts that are a function of group and member, and ahead of the training."""

    def __init__(self, client: EverrollClient, name: str, task_queue: str, root: Path, num_steps: int) -> None:
        self.client, self.name, self.task_queue, self.root, self.num_steps = client, name, task_queue, root, num_steps
        self.store = LocalStore(root / "store")
        self.simulation = Simulation(train_queue_suffix="-elsewhere", light_activities=[store_group])
        self.simulation.collect = self.collect

    def collect(self, key: EpisodeKey) -> CollectResult:
        rng = np.random.default_rng([key.group, key.member])
        sample = build_sample(rng, int(rng.integers(8, 24)), weight_version=self.simulation.weight_version)
        samples = SamplesRef(
            blob=self.store.put("samples", ".safetensors", encode_samples(SampleSet(key.session_id, (sample,)))),
            num_samples=1,
            num_tokens=sample.num_tokens,
            num_sampled_tokens=sample.num_sampled_tokens,
            min_weight_version=self.simulation.weight_version,
            max_weight_version=self.simulation.weight_version,
        )
        return CollectResult(key=key, status=SampleStatus.COMPLETED, samples=samples)

    async def start(self, **train: object) -> None:
        spec = build_spec(
            self.name,
            self.task_queue,
            run={"num_steps": self.num_steps, "output_dir": str(self.root / "runs")},
            model={"path": str(save_model(self.root / "model"))},
            rollout={"episodes_per_group": 3, "max_staleness": 2},
            train={
                "device": "cpu",
                "heartbeat_timeout_seconds": 3.0,
                "learning_rate": 1e-2,
                "checkpoint_every": 4,
                "num_minibatches": 2,
                "tokens_per_microbatch": 40,
                "on_replay_difference": "fail",
                **train,
            },
            services={"store_url": str(self.store.root)},
        )
        await self.client.start(spec)

    def build_environment(self, server: TemporalServer) -> dict[str, str]:
        """Of a trainer worker."""
        return {
            "EVERROLL_TEMPORAL_ADDRESS": server.address,
            "EVERROLL_TASK_QUEUE": self.task_queue,
            "EVERROLL_TORCH_THREADS": "1",
        }

    def read_batch(self, step: int) -> list[GroupBatchItem]:
        record = RunDirectory(self.root / "runs" / self.name).read_record(step)
        assert record is not None
        return record.batch

    def count_steps(self) -> int:
        return len(list((self.root / "runs" / self.name / "steps").glob("step_*.json")))

    async def wait_for_step(self, step: int) -> None:
        async with asyncio.timeout(200):
            while self.count_steps() < step:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def finish(self) -> bytes:
        """Wait for the end; returns the last weights. No episode was played twice, no group trained twice."""
        async with asyncio.timeout(300):
            result = await self.client.result(self.name)
        assert result.steps == self.num_steps
        directory = self.root / "runs" / self.name
        steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, self.num_steps + 1))
        played = Counter((request.key.group, request.key.member) for request in self.simulation.episodes)
        assert set(played.values()) == {1}
        trained = [item.group for step in range(1, self.num_steps + 1) for item in self.read_batch(step)]
        assert len(set(trained)) == len(trained) == self.num_steps * GROUPS_PER_STEP
        return (directory / "weights" / f"step_{self.num_steps:06d}" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_a_trainer_killed_at_ten_random_moments(
    client: EverrollClient,
    temporal_server: TemporalServer,
    server: ForkServer,
    task_queue: str,
    run_name: str,
    tmp_path: Path,
) -> None:
    """The clean run is one of the same stored batches: rollouts that overlap with training are not the same twice."""
    run = Run(client, run_name, task_queue, tmp_path, NUM_STEPS)
    environment = run.build_environment(temporal_server)
    moments = random.Random(5)
    async with run.simulation.workers(client.temporal, run.task_queue):
        await run.start()
        for number in range(10):
            trainer = server.start("worker", ["trainer"], tmp_path / f"{number}.log", environment=environment)
            await asyncio.to_thread(trainer.read_until, "worker ready")
            # Within the load of a checkpoint and what is trained again, or within one of the next steps.
            await run.wait_for_step(run.count_steps() + moments.choice([0, 1, 1]))
            await asyncio.sleep(moments.uniform(0.0, 0.3))
            assert (await client.status(run.name)).state == "running"
            os.kill(trainer.process, signal.SIGKILL)
            assert trainer.wait() == -signal.SIGKILL
        trainer = server.start("worker", ["trainer"], tmp_path / "last.log", environment=environment)
        weights = await run.finish()
        os.kill(trainer.process, signal.SIGTERM)
        assert await asyncio.to_thread(trainer.wait) == 0
    assert weights == await train_cleanly(run, lambda arguments, log: [server.start("trainer", arguments, log)])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
async def test_a_killed_rank_ends_its_trainer_and_the_retry_recovers(
    client: EverrollClient,
    temporal_server: TemporalServer,
    server: ForkServer,
    task_queue: str,
    run_name: str,
    tmp_path: Path,
    parallel: str,
) -> None:
    """Rank 0 says so and ends at once, by itself: nothing looks after these two processes, as torchrun would."""
    run = Run(client, run_name, task_queue, tmp_path, num_steps=6)
    environment = run.build_environment(temporal_server)
    async with run.simulation.workers(client.temporal, run.task_queue):
        await run.start(parallel=parallel, checkpoint_every=2, heartbeat_timeout_seconds=30.0)
        ranks = server.start_ranks("worker", ["trainer"], tmp_path / "first", environment=environment)
        await run.wait_for_step(3)
        os.kill(ranks[1].process, signal.SIGKILL)
        assert await asyncio.to_thread(ranks[0].wait) == 1
        assert "LostRankError: rank 0 of 2: " in ranks[0].log.read_text()
        assert run.count_steps() < run.num_steps
        ranks = server.start_ranks("worker", ["trainer"], tmp_path / "second", environment=environment)
        weights = await run.finish()
        os.kill(ranks[0].process, signal.SIGTERM)
        assert [await asyncio.to_thread(rank.wait) for rank in ranks] == [0, 0]
        assert "LostRankError" not in ranks[0].log.read_text()
    assert weights == await train_cleanly(run, lambda arguments, log: server.start_ranks("trainer", arguments, log))


async def train_cleanly(run: Run, start: Callable[[list[str], Path], list[Forked]]) -> bytes:
    """The last weights of a trainer that was left alone with the batches of a run."""
    requests = run.root / "runs" / run.name / "requests"
    copy = run.root / "clean"
    trainers = start(["--threads", "1", "--run-dir", str(copy), str(requests)], run.root / "clean.log")
    for trainer in trainers:
        assert await asyncio.to_thread(trainer.wait, 300.0) == 0, trainer.log.read_text()
    return (copy / "weights" / f"step_{run.num_steps:06d}" / "model.safetensors").read_bytes()
