"""What a person asks of a running run: checked, counted, kept with who and when."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.outcomes import Cause, CauseKind
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.steering import (
        MAX_STEERINGS,
        Change,
        SetRequest,
        SkipRequest,
        SteeringRecord,
        SteerRequest,
        apply_changes,
    )
    from everroll.contracts.training import RunState

_NUM_STEPS = "run.num_steps"


class Steering:
    """Keeps the account of what was asked; what comes of it is the run's business."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def note(
        self, action: str, request: SteerRequest, *, group: int | None = None, changes: dict[str, Change] | None = None
    ) -> SteeringRecord:
        """Put an accepted request on record."""
        state = self._state
        state.num_steerings += 1
        record = SteeringRecord(
            number=state.num_steerings,
            at=workflow.time(),
            action=action,
            by=request.by,
            reason=request.reason,
            step=state.step,
            group=group,
            changes=changes or {},
        )
        state.steerings = [*state.steerings, record][-MAX_STEERINGS:]
        state.unrecorded_steerings.append(record)
        return record

    def plan_changes(self, spec: RunSpec, request: SetRequest) -> tuple[RunSpec, dict[str, Change]]:
        """What a `set` comes to.

        Raises:
            ValueError: it is refused; the text has a line for each reason.
        """
        changed, changes = apply_changes(spec, request.values)
        if not changes:
            raise ValueError("in force already: " + ", ".join(f"{key} = {v}" for key, v in request.values.items()))
        if _NUM_STEPS in changes and changed.run.num_steps <= self._state.step:
            raise ValueError(
                f"{_NUM_STEPS} = {changed.run.num_steps}: step {self._state.step} is done; the run can end with step "
                f"{self._state.step + 1} at the earliest"
            )
        return changed, changes

    def check_skip(self, request: SkipRequest) -> None:
        """
        Raises:
            ValueError: the group cannot be skipped; the text says why.
        """
        state, group = self._state, request.group
        if group in state.skipping:
            raise ValueError(f"group {group} is being skipped already")
        if group in state.in_flight or group in state.replay or any(ready.group == group for ready in state.ready):
            return
        if group >= state.next_group or group < 0:
            raise ValueError(f"group {group} has not started; the next one is group {state.next_group}")
        raise ValueError(f"group {group} is being trained, or settled already")


def build_skip_cause(request: SkipRequest) -> Cause:
    """Why a skipped group is dropped."""
    by = f" by {request.by}" if request.by else ""
    reason = f": {request.reason}" if request.reason else ""
    return Cause(kind=CauseKind.SKIPPED, message=f"group {request.group} was skipped{by}{reason}")
