"""Requests and results of a curriculum: which prompts the next block of groups plays."""

from __future__ import annotations

from pydantic import Field

from everroll.contracts.base import Payload
from everroll.contracts.rollout import DatasetRef
from everroll.contracts.spec import CurriculumSpec
from everroll.contracts.training import StepRecord


class PlanRequest(Payload):
    """Input of `plan_block`."""

    curriculum: CurriculumSpec
    dataset: DatasetRef
    first_group: int
    steps: list[StepRecord] = Field(default_factory=list)
    """The latest finished steps, oldest first; empty unless the run file asks for them."""
    run_dir: str = ""
    """Where the choice is kept, so that it holds when the run is resumed; empty: nowhere."""


class PlanResult(Payload):
    """Result of `plan_block`."""

    prompts: list[int]
    """Prompt index of each group of the block."""


class PlannedBlock(Payload):
    """One line of `<run_dir>/curriculum.jsonl`: what was chosen, and by which curriculum."""

    first_group: int
    prompts: list[int]
    curriculum: CurriculumSpec
