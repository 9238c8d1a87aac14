"""Keeps a workflow from going on by a history that was read in the middle of things.

A query that waited for a worker brings the history as it is when a worker takes it. Meanwhile a timer may have fired or
an activity ended, and the workflow task that is to handle this has not been started. The SDK's core applies such events
all the same, and keeps what the workflow decides for the task to come. But the time of that task
(`workflow.time()`), and whether continue-as-new is suggested or another worker version is out, are recorded when it
starts: the workflow still sees the values of the task before. Where its next command hangs on one of them, no replay
of the history takes the same branch again, and the run stands still with a non-determinism error once its worker is
replaced.

The query is refused instead, and the worker forgets what it applied. Whoever asks again gets an answer: the workflow
task is next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion

if TYPE_CHECKING:
    from temporalio.bridge.proto.workflow_activation import WorkflowActivation

REFUSAL = "events have come in that no workflow task has taken up yet; ask again"

_HARMLESS = ("query_workflow", "remove_from_cache")
"""Jobs that change nothing of the workflow."""


class PartialHistoryGuard:
    """Watches the activations of one workflow in one worker's cache."""

    def __init__(self) -> None:
        self._num_events = 0
        self._task: tuple[int, int] | None = None

    def refuse(self, activation: WorkflowActivation) -> WorkflowActivationCompletion | None:
        """A failure to answer with, where events are to be applied that belong to no workflow task; None otherwise.

        The start of a task records time and the history's size. Either can be that of the task before (a clock is set
        back; a task is started together with the completion of one that left no trace), but not both.
        """
        if all(job.WhichOneof("variant") in _HARMLESS for job in activation.jobs):
            return None
        task = (activation.timestamp.ToNanoseconds(), activation.history_size_bytes)
        if task == self._task and activation.history_length > self._num_events and not activation.is_replaying:
            completion = WorkflowActivationCompletion(run_id=activation.run_id)
            completion.failed.failure.message = REFUSAL
            completion.failed.failure.application_failure_info.type = "PartialHistory"
            return completion
        self._num_events, self._task = activation.history_length, task
        return None
