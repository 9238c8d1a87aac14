"""What can be asked of a run that is under way, by whoever sits here."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import temporalio.client
from pydantic import ValidationError
from temporalio.exceptions import FailureError
from temporalio.service import RPCError, RPCStatusCode

from everroll.client_base import RPC_TIMEOUT, STATES, RunHandles, SteeringError, translate_rpc_error
from everroll.contracts import names
from everroll.contracts.base import list_faults
from everroll.contracts.steering import JsonValue, SetRequest, SkipRequest, SteeringRecord, SteerRequest
from everroll.contracts.training import ResumeRequest

_R = TypeVar("_R", bound=SteerRequest)

STEER_TIMEOUT = timedelta(seconds=30)


class RunSteering(RunHandles):
    """Each request says who asks and why; the run keeps both."""

    async def stop(self, run: str, reason: str = "") -> None:
        """Ask a run to stop after the step it is in.

        Raises:
            RunNotFoundError: no such run.
            SteeringError: it has ended, or it is asked to already.
        """
        await self._steer(run, names.UPDATE_STOP, _build_request(SteerRequest, reason))

    async def pause(self, run: str, reason: str = "") -> None:
        """Start no new group and no new episode until `resume`.

        Raises:
            RunNotFoundError: no such run.
            SteeringError: it has ended, or it is paused already.
        """
        await self._steer(run, names.UPDATE_PAUSE, _build_request(SteerRequest, reason))

    async def resume(self, run: str, reason: str = "") -> None:
        """Go on after a pause, whoever began it. `resume_ended` is for a run that has ended.

        Raises:
            RunNotFoundError: no such run.
            SteeringError: it has ended, or it is not paused.
        """
        await self._steer(run, names.UPDATE_RESUME, _build_request(SteerRequest, reason))

    async def set_values(self, run: str, values: Mapping[str, JsonValue], reason: str = "") -> SteeringRecord:
        """Change settings of a running run, by their keys in the run file; docs/steering.md says from when they count.

        Raises:
            RunNotFoundError: no such run.
            SteeringError: it has ended, or a key cannot change, a value is not valid, or all are in force already; all
                faults at once.
        """
        request = _build_request(SetRequest, reason, values=dict(values))
        return SteeringRecord.model_validate(await self._steer(run, names.UPDATE_SET, request))

    async def skip(self, run: str, group: int, reason: str = "") -> None:
        """Drop a group that is in flight or ready.

        Raises:
            RunNotFoundError: no such run.
            SteeringError: it has ended, or the group has not started, is being trained, or is settled.
        """
        await self._steer(run, names.UPDATE_SKIP, _build_request(SkipRequest, reason, group=group))

    async def _steer(self, run: str, update: str, request: SteerRequest) -> object:
        try:
            return await self.handle(run).execute_update(update, request, rpc_timeout=STEER_TIMEOUT)
        except temporalio.client.WorkflowUpdateFailedError as error:
            text = error.cause.message if isinstance(error.cause, FailureError) else str(error.cause)
            raise SteeringError(f"run {run}: {text}") from error
        except temporalio.client.WorkflowUpdateRPCTimeoutOrCancelledError as error:
            raise ConnectionError(build_silence(run)) from error
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                await self._refuse_ended(run)
            raise translate_rpc_error(error, run) from error

    async def _refuse_ended(self, run: str) -> None:
        """
        Raises:
            SteeringError: it has ended; the text says how and when.
            RunNotFoundError: no such run.
        """
        try:
            found = await self.handle(run).describe(rpc_timeout=RPC_TIMEOUT)
        except RPCError as error:
            raise translate_rpc_error(error, run) from error
        if found.status is None or found.close_time is None or STATES[found.status] == "running":
            return
        goes_on = "" if STATES[found.status] == "completed" else f"; it goes on with: everroll resume {run}"
        raise SteeringError(
            f"run {run} has ended: {STATES[found.status]} at {found.close_time:%Y-%m-%d %H:%M:%S} UTC, see everroll "
            f"status {run}{goes_on}"
        )

    async def cancel(self, run: str, reason: str = "") -> None:
        """Cancel a run at once; its groups in flight are cancelled with it.

        Raises:
            RunNotFoundError: no such run.
            SteeringError: it has ended.
        """
        await self._refuse_ended(run)  # Temporal says nothing of it
        text = f"by {name_person()}" + (f": {reason}" if reason else "")
        try:
            await self.handle(run).cancel(reason=text, rpc_timeout=RPC_TIMEOUT)
        except RPCError as error:
            raise translate_rpc_error(error, run) from error


def build_silence(run: str) -> str:
    """What is said of a run that has not answered in time."""
    seconds = STEER_TIMEOUT.total_seconds()
    return (
        f"run {run} did not answer within {seconds:g} s: does a workflow worker run? What was asked may still be done; "
        f"everroll status {run} shows it"
    )


def name_person() -> str:
    """Who steers, as far as this machine knows."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:300]


def _build_request(kind: type[_R], reason: str, **values: object) -> _R:
    """
    Raises:
        SteeringError: the reason is too long, or no single line.
    """
    try:
        return kind.model_validate({"reason": reason, "by": name_person(), **values})
    except ValidationError as error:
        raise SteeringError(f"cannot be asked: {'; '.join(list_faults(error))}") from error


def build_resume(reason: str, changes: Mapping[str, JsonValue], *, from_file: bool) -> ResumeRequest:
    """How a run goes on: asked for by whoever sits here.

    Raises:
        SteeringError: the reason is too long, or no single line.
    """
    request = _build_request(SteerRequest, reason)
    return ResumeRequest(from_file=from_file, changes=dict(changes), by=request.by, reason=request.reason)
