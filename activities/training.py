"""`prepare_trainer` and `train_step`: the trainer behind Temporal, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from temporalio import activity

from activities.heartbeats import heartbeating
from everroll.contracts import names
from everroll.contracts.training import PrepareTrainerRequest, TrainRequest, TrainResult, Weights
from trainer.errors import LostRankError
from trainer.service import Trainer

T = TypeVar("T")


class TrainingActivities:
    """Hosts one trainer. Torch never runs on the event loop, and never twice at once."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    @activity.defn(name=names.PREPARE_TRAINER)
    async def prepare_trainer(self, request: PrepareTrainerRequest) -> Weights:
        async with heartbeating("loading the model"):
            return await self._run(lambda: self._trainer.prepare(request))

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, request: TrainRequest) -> TrainResult:
        async with heartbeating("starting the step") as progress:
            return await self._run(lambda: self._trainer.train_step(request, progress.report))

    async def _run(self, work: Callable[[], T]) -> T:
        """A step that has begun is finished even if the activity is cancelled: a half-applied one must not be left.

        Where another of the trainer's processes was lost it cannot be: this process ends, and may hang until then.
        """
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if self._trainer.lost_a_process:
                raise LostRankError("a process of this trainer was lost; it starts again") from None
            await asyncio.wait([future])
            raise
