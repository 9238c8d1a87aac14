"""Evaluate a run's weights on demand: through the run while it goes on, and by itself once it has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import temporalio.client
from temporalio.client import WorkflowFailureError
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from everroll.audit.histories import HistoryReader
from everroll.client import EverrollClient, RunView, SteeringError, describe_failure
from everroll.client_steering import STEER_TIMEOUT, build_silence
from everroll.contracts import names
from everroll.contracts.evaluation import (
    EvaluateRequest,
    EvaluateResult,
    EvaluationRecord,
    EvaluationRequest,
    apply_request,
    build_evaluation_request,
    find_request_fault,
    select_sets,
)
from everroll.contracts.health import Pause
from everroll.contracts.spec import RunSpec
from everroll.running import find_shared_engines, goes_on, read_running

_RPC_TIMEOUT = timedelta(seconds=30)
_PAUSE_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Evaluated:
    """What came of a request."""

    version: int
    records: list[EvaluationRecord]
    """In the order of the sets. One that failed has `failure`."""


async def evaluate_run(
    client: EverrollClient,
    run: str,
    request: EvaluateRequest,
    version: int | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> Evaluated:
    """Evaluate and wait for the result. `version` None: the newest.

    A paused run is not asked: its evaluations would wait. `on_notice` is told of a pause that begins meanwhile.

    While the run goes on, its engines serve the version that is out, and only that can be evaluated; the run is not
    held up. Once it has ended, any version whose weights are kept can: they are published to the run's engines first.

    Raises:
        RunNotFoundError: no such run.
        SteeringError: it cannot be evaluated so; the text says why.
        ConnectionError: Temporal does not answer.
    """
    view = await client.status(run)
    if view.state == "running":
        return await _ask_run(client, view, request, version, on_notice or (lambda text: None))
    return await _evaluate_ended(client, view, request, version)


async def _ask_run(
    client: EverrollClient,
    view: RunView,
    request: EvaluateRequest,
    version: int | None,
    on_notice: Callable[[str], None],
) -> Evaluated:
    pause = view.status.pause if view.status is not None else None
    if pause is not None:
        raise SteeringError(f"{_describe_pause(view.run, pause)}; then evaluate it")
    if version is not None and view.status is not None and view.status.weight_version != version:
        raise SteeringError(
            f"run {view.run} goes on, and its engines serve what is out: the run is at version "
            f"{view.status.weight_version}; other versions can be evaluated once it has ended"
        )
    handle = client.temporal.get_workflow_handle(view.workflow_id)
    try:
        result: EvaluateResult = await handle.execute_update(
            names.UPDATE_EVALUATE, request, result_type=EvaluateResult, rpc_timeout=STEER_TIMEOUT
        )
    except temporalio.client.WorkflowUpdateFailedError as error:
        raise SteeringError(f"run {view.run}: {describe_failure(error.cause)}") from error
    except temporalio.client.WorkflowUpdateRPCTimeoutOrCancelledError as error:
        raise ConnectionError(build_silence(view.run)) from error
    watch = asyncio.create_task(_watch_pauses(client, view.run, on_notice))
    try:
        return Evaluated(result.version, [await _wait(client, workflow_id) for workflow_id in result.workflow_ids])
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch_pauses(client: EverrollClient, run: str, on_notice: Callable[[str], None]) -> None:
    """Tell of each pause once."""
    told: Pause | None = None
    while True:
        await asyncio.sleep(_PAUSE_POLL_SECONDS)
        with contextlib.suppress(ConnectionError, LookupError):
            status = (await client.status(run)).status
            pause = status.pause if status is not None else None
            if pause is not None and pause != told:
                on_notice(f"{_describe_pause(run, pause)}; the evaluation waits for that")
                told = pause


def _describe_pause(run: str, pause: Pause) -> str:
    by_itself = f", or by itself when {pause.server} answers" if pause.server else ""
    since = datetime.fromtimestamp(pause.since, UTC)
    return (
        f"run {run} is paused since {since:%Y-%m-%d %H:%M:%S} UTC ({pause.message}) and plays nothing; it goes on "
        f"with: everroll resume {run}{by_itself}"
    )


async def _evaluate_ended(
    client: EverrollClient, view: RunView, request: EvaluateRequest, version: int | None
) -> Evaluated:
    spec = (await HistoryReader(client.temporal, view.run).read_start()).spec
    fault = find_request_fault(spec.eval, request)
    if fault is not None:
        raise SteeringError(f"run {view.run}: {fault}")
    await _check_engines(client, spec)
    weights = _find_weights(spec, version)
    section = apply_request(spec.eval, request)
    records = []
    # One after the other: each publishes, and never two at once to the same engine.
    for name, path in select_sets(spec.eval, request).items():
        started = build_evaluation_request(spec, name, path, section, weights[0])
        started = started.model_copy(update={"requested": True, "weights_path": str(weights[1])})
        await _start(client, view.run, started)
        records.append(await _wait(client, started.workflow_id))
    return Evaluated(weights[0], records)


def _find_weights(spec: RunSpec, version: int | None) -> tuple[int, Path]:
    """Version and directory of weights that are kept."""
    parent = Path(spec.run.output_dir) / spec.run.name / "weights"
    kept = {int(path.name.removeprefix("step_")): path for path in sorted(parent.glob("step_*"))}
    if not kept:
        raise SteeringError(f"{parent} holds no weights, as seen from here")
    chosen = max(kept) if version is None else version
    if chosen not in kept:
        there = ", ".join(map(str, kept))
        raise SteeringError(f"{parent}: there is no step_{chosen:06d}; kept are {there} (see train.keep_weights)")
    return chosen, kept[chosen]


async def _check_engines(client: EverrollClient, spec: RunSpec) -> None:
    """Weights are never published under a run that goes on.

    Raises:
        SteeringError: another run uses an engine of this one.
    """
    async for other, request in read_running(client.temporal):
        shared = find_shared_engines(request, spec.services.engine_urls)
        if shared and await goes_on(client.temporal, other.id):
            raise SteeringError(
                f"run {request.spec.run.name} goes on and uses {', '.join(shared)}; wait until it has ended"
            )


async def _start(client: EverrollClient, run: str, request: EvaluationRequest) -> None:
    try:
        await client.temporal.start_workflow(
            names.EVALUATION,
            request,
            id=request.workflow_id,
            task_queue=request.services.task_queue,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
            static_summary=f"set {request.name}, weights {request.version}, on demand",
            rpc_timeout=_RPC_TIMEOUT,
        )
    except WorkflowAlreadyStartedError as error:
        text = (
            f"run {run}: set {request.name} was evaluated on version {request.version} already; see evaluations.jsonl"
        )
        raise SteeringError(text) from error


async def _wait(client: EverrollClient, workflow_id: str) -> EvaluationRecord:
    """As long as it takes; a failure is a record too."""
    handle = client.temporal.get_workflow_handle(workflow_id, result_type=EvaluationRecord)
    try:
        record: EvaluationRecord = await handle.result()
    except WorkflowFailureError as error:
        name, version = _parse_id(workflow_id)
        return EvaluationRecord(name=name, version=version, failure=describe_failure(error.cause), complete=False)
    return record


def _parse_id(workflow_id: str) -> tuple[str, int]:
    """Set and version; the id of the only set of a run ends with the version."""
    *_, before, last = workflow_id.split("/")
    return (names.DEFAULT_EVALUATION, int(last)) if last.isdigit() else (last, int(before))
