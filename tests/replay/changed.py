"""`TrainingRun` as someone might change it without a thought for open runs: one more activity at the start."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.training import TrainingRunRequest, TrainingRunResult
    from workflows import policies
    from workflows.training_run import TrainingRun


@workflow.defn(name=names.TRAINING_RUN, failure_exception_types=policies.FAILURE_EXCEPTION_TYPES)
class ChangedRun(TrainingRun):
    @workflow.init
    def __init__(self, request: TrainingRunRequest) -> None:
        super().__init__(request)

    @workflow.run
    async def run(self, request: TrainingRunRequest) -> TrainingRunResult:
        await workflow.execute_activity("check_something", start_to_close_timeout=timedelta(seconds=10))
        return await super().run(request)
