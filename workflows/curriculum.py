"""The curriculum of a run: which prompt each group plays, where a user's function chooses."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.curriculum import PlanRequest, PlanResult
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.training import RunState
    from workflows import policies


class Curriculum:
    """Has the prompts of a block of groups chosen before the first of them starts, and keeps them in the state.

    They are dispensed from the state alone, so that each choice is played once, whatever happens to the activity.
    """

    def __init__(self, spec: RunSpec, state: RunState) -> None:
        self._spec = spec
        self._curriculum = spec.data.curriculum
        self._state = state
        self.planning = False
        """Whether a block is being chosen; `plan` ends it."""

    @property
    def covers_next_group(self) -> bool:
        """Whether the next group's prompt is known; always, without a curriculum."""
        if self._curriculum.function is None:
            return True
        state = self._state
        return state.replay[0] in state.planned if state.replay else state.next_group < state.planned_until

    def find_prompt(self, group: int) -> int | None:
        """The prompt that was chosen for a group; None where the deterministic order decides."""
        return self._state.planned.get(group)

    async def plan(self) -> None:
        """Have the next block chosen."""
        state, first = self._state, self._state.planned_until
        if state.dataset is None:
            raise RuntimeError("groups are planned only after the run was prepared")
        try:
            plan: PlanResult = await workflow.execute_activity(
                names.PLAN_BLOCK,
                PlanRequest(
                    curriculum=self._curriculum,
                    dataset=state.dataset,
                    first_group=first,
                    steps=state.recent_steps if self._curriculum.use_steps else [],
                    run_dir=f"{self._spec.run.output_dir}/{self._spec.run.name}",
                ),
                result_type=PlanResult,
                task_queue=names.rollout_queue(self._spec.services.task_queue),
                start_to_close_timeout=policies.PREPARE_START_TO_CLOSE,
                schedule_to_close_timeout=policies.PREPARE_SCHEDULE_TO_CLOSE,
                heartbeat_timeout=policies.PREPARE_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary=f"prompts of the groups from {first}",
            )
        finally:
            self.planning = False
        chosen = zip(range(first, first + len(plan.prompts)), plan.prompts, strict=True)
        # After a resume a block can hold groups that are settled.
        state.planned.update({g: prompt for g, prompt in chosen if g >= state.next_group or g in state.replay})
        state.planned_until = first + len(plan.prompts)
