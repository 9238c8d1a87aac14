"""`record_run` and `restore_run`: a run's state lies in its directory, and is read from there when it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from activities.heartbeats import heartbeating
from activities.rebuilding import build_plan, build_state, find_cursor, find_trained
from everroll.contracts import names
from everroll.contracts.rollout import GroupResult
from everroll.contracts.training import RecordRunRequest, RestoreRunRequest, RestoreRunResult
from everroll.failures import ConfigurationError
from everroll.run_record import RunRecordDirectory
from trainer.rundir import AppliedStep, RunDirectory

T = TypeVar("T")

_RPC_TIMEOUT = timedelta(seconds=10)
_END_SECONDS = 20.0
"""How long a cancelled group may take to end before it is terminated."""
_CONCURRENCY = 16
_PROBED_AHEAD = 64
"""Groups beyond the known cursor that are asked for at once; the search ends where none of them ever started."""
_NO_GROUPS: dict[str, object] = {"next_group": 0, "replay": [], "planned_until": 0}
"""Of a run that plays nothing: the groups in its batches are another run's."""


class Life(Enum):
    """What Temporal knows of a group's workflow."""

    UNKNOWN = "unknown"
    CLOSED = "closed"
    RUNNING = "running"
    ENDING = "ending"


class RunDirectoryActivities:
    """Needs the run directory where it runs, and a Temporal client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn(name=names.RECORD_RUN)
    async def record_run(self, request: RecordRunRequest) -> None:
        async with heartbeating("writing"):
            await asyncio.to_thread(_record, request)

    @activity.defn(name=names.RESTORE_RUN)
    async def restore_run(self, request: RestoreRunRequest) -> RestoreRunResult:
        """
        Raises:
            ConfigurationError: the directory's records cannot be read, or do not lead to the trainer's version.
        """
        directory = RunRecordDirectory(Path(request.run_dir))
        record = directory.read()
        if record is None:
            raise ConfigurationError(f"{request.run_dir} holds no run.json")
        async with heartbeating("reading the run directory") as progress:
            steps = await asyncio.to_thread(read_steps, Path(request.run_dir), request.version)
            settled = await asyncio.to_thread(directory.read_settled)
            progress.report("looking for groups that still play")
            playing, num_dispensed = await self._find_groups(request, steps, settled)
            settled = await asyncio.to_thread(directory.read_settled)  # some may have ended meanwhile
        state = build_state(
            steps,
            settled,
            dataset=record.dataset,
            num_dispensed=num_dispensed,
            in_flight=playing,
            planned=build_plan(directory.read_plans(), record.spec.data.curriculum),
            steerings=directory.read_steerings(),
            num_resumes=record.num_resumes,
        )
        if record.spec.run.mode == "train":
            state = state.model_copy(update=_NO_GROUPS)
        return RestoreRunResult(spec=record.spec, state=state)

    async def _find_groups(
        self, request: RestoreRunRequest, steps: dict[int, AppliedStep], settled: dict[int, GroupResult]
    ) -> tuple[list[int], int]:
        """Groups of an earlier execution that go on, and one past the last that ever started.

        Those of a run that was cancelled or failed are about to end, and are waited for: two of them must not play the
        same group.
        """
        known = {*find_trained(steps), *settled}
        cursor = max([find_cursor(steps), *(group + 1 for group in known)], default=0)
        lives = await self._ask(request.run, [group for group in range(cursor) if group not in known])
        while ahead := await self._ask(request.run, list(range(cursor, cursor + _PROBED_AHEAD))):
            lives |= ahead
            cursor = max(ahead) + 1
        running = [group for group, life in lives.items() if life is Life.RUNNING]
        ending = [group for group, life in lives.items() if life is Life.ENDING]
        if request.end_groups:
            running, ending = [], [*running, *ending]
        await _in_parallel([self._end(request.run, group) for group in ending])
        return running, cursor

    async def _ask(self, run: str, groups: list[int]) -> dict[int, Life]:
        """Of those that Temporal knows."""
        lives = await _in_parallel([self._find_life(run, group) for group in groups])
        return {group: life for group, life in zip(groups, lives, strict=True) if life is not Life.UNKNOWN}

    async def _find_life(self, run: str, group: int) -> Life:
        try:
            description = await self._handle(run, group).describe(rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return Life.UNKNOWN
            raise
        if description.status is not WorkflowExecutionStatus.RUNNING:
            return Life.CLOSED
        requested = description.raw_description.workflow_extended_info.cancel_requested
        return Life.ENDING if requested else Life.RUNNING

    async def _end(self, run: str, group: int) -> None:
        handle = self._handle(run, group)
        try:
            await handle.cancel(reason="its run is resumed with other settings", rpc_timeout=_RPC_TIMEOUT)
            await asyncio.wait_for(handle.result(), _END_SECONDS)
        except WorkflowFailureError:
            return
        except TimeoutError:
            await handle.terminate(reason="it did not end in time after a cancellation", rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:  # it ended by itself
                raise

    def _handle(self, run: str, group: int) -> WorkflowHandle[object, object]:
        return self._client.get_workflow_handle(names.group_workflow_id(run, group))


async def _in_parallel(calls: list[Coroutine[Any, Any, T]]) -> list[T]:
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def call(work: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await work

    return await asyncio.gather(*map(call, calls))


def read_steps(run_dir: Path, version: int) -> dict[int, AppliedStep]:
    """The records of all steps up to a version.

    Raises:
        ConfigurationError: one is missing.
        CheckpointError: one cannot be read.
    """
    run = RunDirectory(run_dir)
    steps = {}
    for step in range(1, version + 1):
        record = run.read_record(step)
        if record is None:
            raise ConfigurationError(f"{run_dir}: step {step} of {version} has no record; what it trained is not known")
        steps[step] = record
    return steps


def _record(request: RecordRunRequest) -> None:
    directory = RunRecordDirectory(Path(request.run_dir))
    for result in request.settled:
        directory.write_settled(result)
    if request.steerings:
        directory.append_steerings(request.steerings)
    record = directory.read() if request.spec is not None else None
    if record is not None and request.spec is not None:
        directory.write(record.model_copy(update={"spec": request.spec}))
