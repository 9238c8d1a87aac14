"""A run whose trainer worker is killed again and again, through Temporal: no episode runs twice, no bit differs.

Agent and engine are simulated, and their samples are real blobs; workflows, trainer and the server are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
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

NUM_STEPS = 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def build_environment(server: TemporalServer, task_queue: str) -> dict[str, str]:
    return {
        **os.environ,
        "EVERROLL_TEMPORAL_ADDRESS": server.address,
        "EVERROLL_TASK_QUEUE": task_queue,
        "EVERROLL_TORCH_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


class Trainer:
    """Trainer workers as a person starts them, under torchrun."""

    def __init__(self, server: TemporalServer, task_queue: str, log: Path) -> None:
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *torchrun, "-m", "worker", "trainer"],
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=build_environment(server, task_queue),
            )

    async def wait_for(self, pattern: str) -> str:
        """The first match of a pattern in the log; its group if it has one."""
        async with asyncio.timeout(120):
            while not (match := re.search(pattern, self.log.read_text())):
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.02)
        return match[match.re.groups]

    async def stop(self) -> None:
        """By SIGTERM, after which torchrun waits for its processes and ends with an error of its own."""
        self.process.terminate()
        await asyncio.to_thread(self.process.wait, 60)
        assert "worker stopping" in self.log.read_text()


class ForkedTrainers:
    """One trainer worker after the other, for one task queue."""

    def __init__(self, server: TemporalServer, task_queue: str, root: Path) -> None:
        self._root = root
        self._num_started = 0
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "tests.worker_fork"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=build_environment(server, task_queue),
        )

    async def start(self) -> int:
        """The process id of one that polls."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._num_started += 1
        log = self._root / f"trainer-{self._num_started}.log"
        self._driver.stdin.write(f"{log}\n")
        self._driver.stdin.flush()
        pid = int(await asyncio.to_thread(self._driver.stdout.readline))
        async with asyncio.timeout(120):
            while not log.exists() or "worker ready" not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return pid

    def close(self) -> None:
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.close()
        assert self._driver.wait(timeout=30) == 0
        self._driver.stdout.close()


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
                "heartbeat_timeout_seconds": 3.0,
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

    def start_pair(self) -> Trainer:
        self.num_trainers += 1
        return Trainer(self.server, self.task_queue, self.root / f"trainer-{self.num_trainers}.log")

    def count_steps(self) -> int:
        return len(list((self.root / "runs" / self.name / "steps").glob("step_*.json")))

    async def wait_for_step(self, step: int) -> None:
        async with asyncio.timeout(200):
            while self.count_steps() < step:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def finish(self) -> bytes:
        """Wait for the end; returns the last weights."""
        async with asyncio.timeout(300):
            result = await self.client.result(self.name)
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
) -> None:
    clean, killed = build_runs(client, temporal_server, run_name, task_queue, tmp_path)
    trainers = ForkedTrainers(temporal_server, clean.task_queue, clean.root)
    async with clean.simulation.workers(client.temporal, clean.task_queue):
        await clean.start()
        last = await trainers.start()
        wanted = await clean.finish()
    os.kill(last, signal.SIGKILL)
    trainers.close()
    moments = random.Random(5)
    trainers = ForkedTrainers(temporal_server, killed.task_queue, killed.root)
    async with killed.simulation.workers(client.temporal, killed.task_queue):
        await killed.start()
        for _ in range(10):
            trainer = await trainers.start()
            # Within the load of a checkpoint and what is trained again, or within one of the next steps.
            await killed.wait_for_step(killed.count_steps() + moments.choice([0, 1, 1]))
            await asyncio.sleep(moments.uniform(0.0, 0.3))
            assert (await client.status(killed.name)).state == "running"
            os.kill(trainer, signal.SIGKILL)
        last = await trainers.start()
        assert await killed.finish() == wanted
    os.kill(last, signal.SIGKILL)
    trainers.close()


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
        trainer = clean.start_pair()
        wanted = await clean.finish()
        await trainer.stop()
    async with killed.simulation.workers(client.temporal, killed.task_queue):
        await killed.start(parallel)
        trainer = killed.start_pair()
        follower = int(await trainer.wait_for(r"rank 1 of 2 follows \(process (\d+)\)"))
        await killed.wait_for_step(2)
        os.kill(follower, signal.SIGKILL)
        assert await asyncio.to_thread(trainer.process.wait, 60) != 0
        trainer = killed.start_pair()
        assert await killed.finish() == wanted
        await trainer.stop()
