"""A run whose trainer worker is killed again and again, through Temporal: no episode runs twice, no bit differs.

Agent and engine are simulated, and their samples are real blobs; workflows, trainer and the server are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from activities.collection import store_group
from everroll.client import EverrollClient
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import CollectResult, EpisodeKey, SamplesRef
from everroll.store import LocalStore
from everroll.tokens.samples import SampleSet, encode_samples
from tests.conftest import TemporalServer
from tests.simulation import Simulation, build_spec
from tests.trainer_helpers import build_sample, save_model
from workflows import policies

NUM_STEPS = 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Trainer:
    """A trainer worker as a person starts it; with several processes under torchrun."""

    def __init__(self, server: TemporalServer, task_queue: str, log: Path, processes: int) -> None:
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m")
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", *(torchrun if processes > 1 else ()), "worker", "trainer"],
            stdout=subprocess.DEVNULL,
            stderr=log.open("wb"),
            env={
                **os.environ,
                "EVERROLL_TEMPORAL_ADDRESS": server.address,
                "EVERROLL_TASK_QUEUE": task_queue,
                "EVERROLL_TORCH_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    async def wait_for(self, pattern: str) -> str:
        """The first match of a pattern in the log; its group if it has one."""
        async with asyncio.timeout(120):
            while not (match := re.search(pattern, self.log.read_text())):
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.02)
        return match[match.re.groups]

    async def stop(self) -> None:
        self.process.terminate()
        assert await asyncio.to_thread(self.process.wait, 60) == 0


class Run:
    """One run of 12 steps, with rollouts that are a function of group and member."""

    def __init__(self, client: EverrollClient, server: TemporalServer, name: str, task_queue: str, root: Path) -> None:
        self.client, self.server, self.name, self.task_queue, self.root = client, server, name, task_queue, root
        self.store = LocalStore(root / "store")
        self.simulation = Simulation(train_queue_suffix="-elsewhere", light_activities=[store_group])
        self.simulation.collect = self.collect
        self.num_trainers = 0

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

    async def start(self, parallel: str = "ddp") -> None:
        spec = build_spec(
            self.name,
            self.task_queue,
            run={"num_steps": NUM_STEPS, "output_dir": str(self.root / "runs")},
            model={"path": str(save_model(self.root / "model"))},
            rollout={"episodes_per_group": 3},
            train={
                "device": "cpu",
                "learning_rate": 1e-2,
                "checkpoint_every": 4,
                "num_minibatches": 2,
                "tokens_per_microbatch": 40,
                "parallel": parallel,
                "on_replay_difference": "fail",
            },
            services={"store_url": str(self.store.root)},
        )
        await self.client.start(spec)

    def start_trainer(self, processes: int = 1) -> Trainer:
        self.num_trainers += 1
        return Trainer(self.server, self.task_queue, self.root / f"trainer-{self.num_trainers}.log", processes)

    def count_steps(self) -> int:
        return len(list((self.root / "runs" / self.name / "steps").glob("step_*.json")))

    async def wait_for_step(self, step: int) -> None:
        async with asyncio.timeout(200):
            while self.count_steps() < step:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def finish(self, processes: int = 1) -> bytes:
        """Train to the end; returns the last weights."""
        trainer = self.start_trainer(processes)
        async with asyncio.timeout(300):
            result = await self.client.result(self.name)
        await trainer.stop()
        assert result.steps == NUM_STEPS
        directory = self.root / "runs" / self.name
        steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, NUM_STEPS + 1))
        played = Counter(request.key.session_id for request in self.simulation.episodes)
        assert len(played) == NUM_STEPS * 2 * 3
        assert set(played.values()) == {1}
        return (directory / "weights" / f"step_{NUM_STEPS:06d}" / "model.safetensors").read_bytes()


def build_runs(
    client: EverrollClient, server: TemporalServer, name: str, task_queue: str, root: Path
) -> tuple[Run, Run]:
    runs = []
    for kind in ("clean", "killed"):
        (root / kind).mkdir()
        runs.append(Run(client, server, f"{name}-{kind}"[-60:].strip("-"), f"{task_queue}-{kind}", root / kind))
    return runs[0], runs[1]


async def test_a_trainer_killed_at_ten_random_moments(
    client: EverrollClient,
    temporal_server: TemporalServer,
    task_queue: str,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "TRAIN_HEARTBEAT", timedelta(seconds=3))
    clean, killed = build_runs(client, temporal_server, run_name, task_queue, tmp_path)
    async with clean.simulation.workers(client.temporal, clean.task_queue):
        await clean.start()
        wanted = await clean.finish()
    moments = random.Random(5)
    async with killed.simulation.workers(client.temporal, killed.task_queue):
        await killed.start()
        for _ in range(10):
            trainer = killed.start_trainer()
            await trainer.wait_for("worker ready")
            # Within the load of a checkpoint and what is trained again, or within one of the next steps.
            await killed.wait_for_step(killed.count_steps() + moments.choice([0, 1, 1]))
            await asyncio.sleep(moments.uniform(0.0, 0.3))
            assert (await client.status(killed.name)).state == "running"
            trainer.process.kill()
            await asyncio.to_thread(trainer.process.wait, 30)
        assert await killed.finish() == wanted


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
async def test_a_killed_rank_ends_its_trainer_and_the_retry_recovers(
    client: EverrollClient,
    temporal_server: TemporalServer,
    task_queue: str,
    run_name: str,
    tmp_path: Path,
    parallel: str,
) -> None:
    """The attempt fails at once and by name, well before its heartbeat times out; torchrun ends with an error."""
    clean, killed = build_runs(client, temporal_server, run_name, task_queue, tmp_path)
    async with clean.simulation.workers(client.temporal, clean.task_queue):
        await clean.start(parallel)
        wanted = await clean.finish(processes=2)
    async with killed.simulation.workers(client.temporal, killed.task_queue):
        await killed.start(parallel)
        trainer = killed.start_trainer(processes=2)
        follower = int(await trainer.wait_for(r"rank 1 of 2 follows \(process (\d+)\)"))
        await killed.wait_for_step(2)
        os.kill(follower, 9)
        assert await asyncio.to_thread(trainer.process.wait, 60) != 0
        assert await killed.finish(processes=2) == wanted
