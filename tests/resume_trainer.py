"""Workers with the real trainer, for runs that lose everything: `python -m tests.resume_trainer ADDRESS QUEUE ROOT`.

Agent and engine are simulated, as functions of group and member; samples, trainer, records and workflows are real.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import torch
from temporalio.client import Client

from activities.training import TrainingActivities
from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import CollectResult, EpisodeKey, SamplesRef
from everroll.contracts.spec import RunSpec
from everroll.store import LocalStore
from everroll.tokens.samples import SampleSet, encode_samples
from tests.resume_helpers import HeldSimulation, connect
from tests.trainer_helpers import build_sample, save_model
from trainer.service import Trainer


class TrainingSimulation(HeldSimulation):
    """As its base, with weights that are trained."""

    def __init__(self, client: Client, root: Path) -> None:
        super().__init__(client, root)
        training = TrainingActivities(Trainer())
        self.prepare_trainer = training.prepare_trainer  # type: ignore[method-assign]
        self.train_step = training.train_step  # type: ignore[method-assign]
        self.collect = self._collect

    def build_real_spec(self, name: str, task_queue: str, num_steps: int) -> RunSpec:
        return self.build_spec(
            name,
            task_queue,
            run={"num_steps": num_steps},
            model={"path": str(save_model(self.root / "model"))},
            rollout={"episodes_per_group": 3},
            train={"device": "cpu", "learning_rate": 1e-2, "checkpoint_every": 3, "on_replay_difference": "fail"},
        )

    def _collect(self, key: EpisodeKey) -> CollectResult:
        rng = np.random.default_rng([key.group, key.member])
        sample = build_sample(rng, int(rng.integers(8, 24)), weight_version=self.weight_version)
        body = encode_samples(SampleSet(key.session_id, (sample,)))
        samples = SamplesRef(
            blob=LocalStore(self.root / "store").put("samples", ".safetensors", body),
            num_samples=1,
            num_tokens=sample.num_tokens,
            num_sampled_tokens=sample.num_sampled_tokens,
            min_weight_version=self.weight_version,
            max_weight_version=self.weight_version,
        )
        return CollectResult(key=key, status=SampleStatus.COMPLETED, samples=samples)


async def _serve(address: str, task_queue: str, root: Path) -> None:
    torch.set_num_threads(1)
    client = await connect(address)
    async with TrainingSimulation(client.temporal, root).workers(client.temporal, task_queue):
        print(json.dumps("ready"), flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
