"""`plan_block`: the user's curriculum chooses the prompts of the next groups."""

from __future__ import annotations

import asyncio

from temporalio import activity

from activities.heartbeats import heartbeating
from everroll.contracts import names
from everroll.contracts.curriculum import PlanRequest, PlanResult
from everroll.data.curriculum import Block, choose_prompts
from everroll.prompts import DatasetCache


class CurriculumActivities:
    """Runs where agents run, since it is the user's code too."""

    def __init__(self, datasets: DatasetCache) -> None:
        self._datasets = datasets

    @activity.defn(name=names.PLAN_BLOCK)
    async def plan_block(self, request: PlanRequest) -> PlanResult:
        """
        Raises:
            ConfigurationError: the function cannot be imported, or the data set is not what it was.
            CurriculumError: the function failed.
        """
        async with heartbeating(f"curriculum {request.curriculum.function}"):
            return PlanResult(prompts=await asyncio.to_thread(self._plan, request))

    def _plan(self, request: PlanRequest) -> list[int]:
        curriculum = request.curriculum
        block = Block(
            first_group=request.first_group,
            num_groups=curriculum.block_groups,
            seed=request.dataset.seed,
            dataset=self._datasets.get(request.dataset),
            args=curriculum.args,
            steps=request.steps,
        )
        return choose_prompts(curriculum.function or "", block)
