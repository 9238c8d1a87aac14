"""Activities of an evaluation: its prompts, its outcomes on their way to the store, and its result."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError, FailureError, TerminatedError

from activities.heartbeats import heartbeating
from activities.terminal import find_terminal
from everroll.contracts import names
from everroll.contracts.evaluation import (
    AwaitEvaluationRequest,
    EvaluationRecord,
    FinishEvaluationRequest,
    OpenEvaluationRequest,
    StoreEpisodesRequest,
)
from everroll.contracts.rollout import BlobRef, DatasetRef, EpisodeOutcome
from everroll.evaluation import summarize_outcomes
from everroll.prompts import load_dataset
from everroll.records import append_once
from everroll.store import LocalStore, StoreError, open_store


@activity.defn(name=names.OPEN_EVALUATION)
async def open_evaluation(request: OpenEvaluationRequest) -> DatasetRef:
    """
    Raises:
        ConfigurationError: the prompts are missing, or rows are none.
    """
    async with heartbeating("reading the prompts"):
        dataset = await asyncio.to_thread(load_dataset, request.path)
    return DatasetRef(
        path=request.path, fingerprint=dataset.fingerprint, num_prompts=len(dataset), seed=0, shuffle=False
    )


@activity.defn(name=names.STORE_EPISODES)
async def store_episodes(request: StoreEpisodesRequest) -> BlobRef:
    """Write outcomes, one a line. The same ones give the same blob."""
    body = "".join(outcome.model_dump_json() + "\n" for outcome in request.outcomes).encode()
    prefix = f"{request.run}/evaluations/{request.label}"
    async with heartbeating("writing"):
        return await asyncio.to_thread(open_store(request.store_url).put, prefix, ".jsonl", body)


@activity.defn(name=names.FINISH_EVALUATION)
async def finish_evaluation(request: FinishEvaluationRequest) -> EvaluationRecord:
    """Compute the numbers and write the result down, once for each set and version."""
    async with heartbeating("computing"):
        return await asyncio.to_thread(_finish, request)


def _finish(request: FinishEvaluationRequest) -> EvaluationRecord:
    store, record = open_store(request.store_url), request.record
    if request.parts:
        body = b"".join(store.get(part) for part in request.parts)
        record = _summarize(request, store, body)
    path = Path(request.run_dir) / names.EVALUATIONS_FILE
    try:
        append_once(path, record.model_dump(mode="json"), lambda line: _is_same(line, record))
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error
    return record


def _summarize(request: FinishEvaluationRequest, store: LocalStore, body: bytes) -> EvaluationRecord:
    # Ordered by prompt and episode, so that the blob does not depend on who was ready first.
    outcomes = sorted(
        (EpisodeOutcome.model_validate_json(line) for line in body.splitlines()),
        key=lambda outcome: (outcome.key.group, outcome.key.member),
    )
    record = summarize_outcomes(request.record, outcomes)
    lines = "".join(outcome.model_dump_json() + "\n" for outcome in outcomes).encode()
    label = names.evaluation_label(record.name, record.version)
    blob = store.put(f"{request.run}/evaluations/{label}", ".jsonl", lines)
    return record.model_copy(update={"episodes": blob})


def _is_same(line: dict[str, Any], record: EvaluationRecord) -> bool:
    """A result is written once; a failure only while there is neither it nor a result."""
    same = (line["name"], line["version"]) == (record.name, record.version)
    return same and (line["failure"] is None or record.failure == line["failure"])


class EvaluationActivities:
    """Re-attaches a run to the evaluations that its earlier generation left in flight."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn(name=names.AWAIT_EVALUATION)
    async def await_evaluation(self, request: AwaitEvaluationRequest) -> EvaluationRecord:
        handle = self._client.get_workflow_handle(request.workflow_id, result_type=EvaluationRecord)
        async with heartbeating(f"waiting for {request.workflow_id}"):
            try:
                record: EvaluationRecord = await handle.result()
            except WorkflowFailureError as error:
                return EvaluationRecord(name=request.name, version=request.version, failure=_describe(error))
        return record


def _describe(error: WorkflowFailureError) -> str:
    if isinstance(error.cause, (CancelledError, TerminatedError)):
        return f"it was ended: {type(error.cause).__name__}"
    if isinstance(error.cause, FailureError):
        return find_terminal(error).message
    return str(error.cause)
