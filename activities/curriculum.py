"""`plan_block`: the user's curriculum chooses the prompts of the next groups."""

from __future__ import annotations

import asyncio
from pathlib import Path

from temporalio import activity

from activities.heartbeats import heartbeating
from everroll.contracts import names
from everroll.contracts.curriculum import PlannedBlock, PlanRequest, PlanResult
from everroll.data.curriculum import Block, choose_prompts
from everroll.prompts import DatasetCache
from everroll.run_record import RunRecordDirectory


class CurriculumActivities:
    """Runs where agents run, since it is the user's code too."""

    def __init__(self, datasets: DatasetCache) -> None:
        self._datasets = datasets

    @activity.defn(name=names.PLAN_BLOCK)
    async def plan_block(self, request: PlanRequest) -> PlanResult:
        """Choose, and keep the choice in the run directory before any group is started by it.

        Raises:
            ConfigurationError: the function cannot be imported, the data set is not what it was, or the run directory
                cannot be written.
            CurriculumError: the function failed.
        """
        async with heartbeating(f"curriculum {request.curriculum.function}"):
            return PlanResult(prompts=await asyncio.to_thread(self._plan, request))

    def _plan(self, request: PlanRequest) -> list[int]:
        if not request.run_dir:
            return self._choose(request)
        directory = RunRecordDirectory(Path(request.run_dir))
        known = directory.read_plan(request.first_group, request.curriculum)
        if known is not None:
            return known.prompts  # an earlier attempt chose
        prompts = self._choose(request)
        directory.append_plan(
            PlannedBlock(first_group=request.first_group, prompts=prompts, curriculum=request.curriculum)
        )
        return prompts

    def _choose(self, request: PlanRequest) -> list[int]:
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
