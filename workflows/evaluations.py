"""Evaluations as their run sees them: when one starts, what becomes of it, and what waits for it.

An evaluation is an abandoned child: it goes on while the run continues as new, and is awaited again. Whatever happens
to one is recorded; none fails the run. A server that is broken for an evaluation is broken for training too, which has
its own policy for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import (
    CancelledError,
    ChildWorkflowError,
    FailureError,
    TerminatedError,
    WorkflowAlreadyStartedError,
)
from temporalio.workflow import ChildWorkflowCancellationType, ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from everroll.contracts import names
    from everroll.contracts.evaluation import (
        MAX_RECENT_EVALUATIONS,
        AwaitEvaluationRequest,
        EvaluateRequest,
        EvaluationRecord,
        EvaluationRequest,
        EvaluationStart,
        apply_request,
        build_evaluation_request,
        find_request_fault,
        select_sets,
    )
    from everroll.contracts.health import HoldRequest
    from everroll.contracts.spec import DataPaths, EvalSection, RunSpec
    from everroll.contracts.training import RunState
    from workflows import policies
    from workflows.evaluation import describe_root, limit_evaluation
    from workflows.presentation import build_search_attributes


class Evaluations:
    """Starts and follows the evaluations of one run; mutates its state's part of them."""

    def __init__(
        self,
        state: RunState,
        *,
        get_spec: Callable[[], RunSpec],
        follow: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        get_hold: Callable[[], HoldRequest],
        on_change: Callable[[], None],
    ) -> None:
        self._get_spec = get_spec
        self._state = state
        self._follow = follow
        self._get_hold = get_hold
        self._on_change = on_change
        self._starting: set[str] = set()
        self._reattached: list[str] = []
        """Ids of those of an earlier generation, which only an external handle reaches."""

    @property
    def _spec(self) -> RunSpec:
        """As it is now: people change it while the run goes on."""
        return self._get_spec()

    @property
    def starting(self) -> bool:
        """Whether the server has not confirmed a start yet."""
        return bool(self._starting)

    def reattach(self) -> None:
        """Those that were in flight when the run continued as new still are."""
        for start in self._state.evaluations_in_flight.values():
            workflow_id = names.evaluation_workflow_id(self._spec.run.name, start.name, start.version)
            self._reattached.append(workflow_id)
            self._follow(self._await_again(start, workflow_id))

    def start_due(self, *, last: bool = False) -> None:
        """Start what the schedule asks for at the version that is out. Asked again, it does nothing.

        `last`: the run takes no further step.
        """
        section, weights = self._spec.eval, self._state.weights
        if weights is None or not section.every or self._state.evaluated_version >= weights.version:
            return
        due = weights.version % section.every == 0 if weights.version else section.at_start
        if not due and not last:
            return
        self._state.evaluated_version = weights.version
        for name, path in section.named_paths.items():
            self._start(self._build_request(name, path, section, requested=False))

    def find_fault(self, request: EvaluateRequest) -> str | None:
        """Why an evaluation that somebody asks for cannot start."""
        if self._state.weights is None:
            return "the run has published no weights yet"
        fault = find_request_fault(self._spec.eval, request)
        if fault is not None:
            return fault
        version = self._state.weights.version
        for name in select_sets(self._spec.eval, request):
            if names.evaluation_label(name, version) in self._state.evaluations_in_flight:
                return f"set {name} is being evaluated on version {version} already"
            done = [record for record in self._state.evaluations if (record.name, record.version) == (name, version)]
            if any(record.failure is None for record in done):
                return f"set {name} was evaluated on version {version} already; everroll status shows the result"
        return None

    def start_requested(self, request: EvaluateRequest) -> list[str]:
        """Evaluate the version that is out now; returns the workflows' ids."""
        section = apply_request(self._spec.eval, request)
        requests = [
            self._build_request(name, path, section, requested=True)
            for name, path in select_sets(self._spec.eval, request).items()
        ]
        for started in requests:
            self._start(started)
        return [started.workflow_id for started in requests]

    async def before_publish(self) -> None:
        """With `on_publish = "block"`: new weights wait for what runs. Bounded by the evaluations' own deadlines."""
        if self._spec.eval.on_publish == "block":
            await self.wait_until_done()

    async def wait_until_done(self) -> None:
        """Until none is in flight."""
        if not self._state.evaluations_in_flight:
            return
        limit = limit_evaluation(self._build_request("", "", self._spec.eval, requested=False))
        await workflow.wait_condition(lambda: not self._state.evaluations_in_flight, timeout=limit)

    def tell_hold(self) -> None:
        """Tell those in flight whether to hold."""
        for start in self._state.evaluations_in_flight.values():
            if names.evaluation_label(start.name, start.version) not in self._starting:
                workflow_id = names.evaluation_workflow_id(self._spec.run.name, start.name, start.version)
                self._follow(self._tell_hold(workflow_id))

    def list_orphans(self) -> list[str]:
        """Workflows in flight that only an external handle reaches; the tasks that wait for the others cancel them."""
        flying = [
            names.evaluation_workflow_id(self._spec.run.name, start.name, start.version)
            for start in self._state.evaluations_in_flight.values()
        ]
        return [workflow_id for workflow_id in self._reattached if workflow_id in flying]

    def _build_request(self, name: str, path: DataPaths, section: EvalSection, *, requested: bool) -> EvaluationRequest:
        version = self._state.weights.version if self._state.weights else 0
        request = build_evaluation_request(self._spec, name, path, section, version)
        return request.model_copy(update={"requested": requested, "hold": self._get_hold()})

    def _start(self, request: EvaluationRequest) -> None:
        start = EvaluationStart(name=request.name, version=request.version, started_at=workflow.time())
        self._state.evaluations_in_flight[request.label] = start
        self._starting.add(request.label)
        self._follow(self._run(request))

    async def _run(self, request: EvaluationRequest) -> None:
        try:
            child = await workflow.start_child_workflow(
                names.EVALUATION,
                request,
                id=request.workflow_id,
                result_type=EvaluationRecord,
                task_queue=self._spec.services.task_queue,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
                parent_close_policy=ParentClosePolicy.ABANDON,
                cancellation_type=ChildWorkflowCancellationType.WAIT_CANCELLATION_REQUESTED,
                execution_timeout=limit_evaluation(request),
                search_attributes=build_search_attributes(self._spec.run.name, self._state.step),
                static_summary=f"set {request.name}, weights {request.version}",
            )
            self._starting.discard(request.label)
            if self._get_hold().number != request.hold.number:
                self._follow(self._tell_hold(request.workflow_id))
            self._finish(await child)
        except WorkflowAlreadyStartedError:
            # After the run was resumed: an earlier execution started it.
            self._reattached.append(request.workflow_id)
            await self._await_again(self._state.evaluations_in_flight[request.label], request.workflow_id)
        except ChildWorkflowError as error:
            self._finish(_build_failure(request.name, request.version, error))
        finally:
            self._starting.discard(request.label)

    async def _await_again(self, start: EvaluationStart, workflow_id: str) -> None:
        limit = limit_evaluation(self._build_request(start.name, "", self._spec.eval, requested=False))
        try:
            record: EvaluationRecord = await workflow.execute_activity(
                names.AWAIT_EVALUATION,
                AwaitEvaluationRequest(workflow_id=workflow_id, name=start.name, version=start.version),
                result_type=EvaluationRecord,
                task_queue=self._spec.services.task_queue,
                start_to_close_timeout=limit,
                schedule_to_close_timeout=limit,
                heartbeat_timeout=policies.AWAIT_GROUP_HEARTBEAT,
                retry_policy=policies.RETRY,
                summary=f"re-attached to evaluation {start.name} of weights {start.version}",
            )
        except FailureError as error:
            if isinstance(error.cause, CancelledError):
                raise asyncio.CancelledError from error
            record = _build_failure(start.name, start.version, error)
        self._finish(record)

    def _finish(self, record: EvaluationRecord) -> None:
        state = self._state
        state.evaluations_in_flight.pop(names.evaluation_label(record.name, record.version), None)
        state.evaluations = [*state.evaluations, record][-MAX_RECENT_EVALUATIONS:]
        if record.failure is not None:
            workflow.logger.warning("evaluation %s of version %d: %s", record.name, record.version, record.failure)
        self._on_change()

    async def _tell_hold(self, workflow_id: str) -> None:
        handle = workflow.get_external_workflow_handle(workflow_id)
        try:
            await handle.signal(names.SIGNAL_HOLD, self._get_hold())
        except FailureError as error:
            workflow.logger.info("%s was not told to hold or go on: %s", workflow_id, error)


def _build_failure(name: str, version: int, error: FailureError) -> EvaluationRecord:
    ended = isinstance(error.cause, (CancelledError, TerminatedError))
    text = f"it was ended: {type(error.cause).__name__}" if ended else describe_root(error)
    return EvaluationRecord(name=name, version=version, failure=text, complete=False)
