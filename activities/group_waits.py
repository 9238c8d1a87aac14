"""Waits for the ends of groups, which outlast the activity that asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError, TerminatedError

from activities.terminal import find_terminal
from everroll.contracts import names
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import GroupResult

_KEEP_SECONDS = 2.0
"""The next call comes within moments, if to this worker: with several of them each would soon keep polls for all
groups, and the server allows a namespace so many (`frontend.namespaceCount`)."""


@dataclass
class _Wait:
    task: asyncio.Task[GroupResult]
    num_holders: int = 0
    expiry: asyncio.TimerHandle | None = None


class GroupWaits:
    """One wait per group, however often it is asked for.

    Each is a long poll at the server. An activity reports the groups that have ended and is called again for the
    others: were their polls opened anew each time, hundreds of groups would cost the server hundreds of requests per
    second. A wait that nobody holds is kept for a while; none outlives its result, since a group may be played again
    under the same name.
    """

    def __init__(self, client: Client, keep_seconds: float = _KEEP_SECONDS) -> None:
        self._client = client
        self._keep_seconds = keep_seconds
        self._waits: dict[str, _Wait] = {}

    @contextlib.contextmanager
    def hold(self, run: str, groups: Sequence[int]) -> Iterator[list[asyncio.Task[GroupResult]]]:
        """Tasks that end when these groups have ended."""
        keys = [names.group_workflow_id(run, group) for group in groups]
        held = [self._take(key, group) for key, group in zip(keys, groups, strict=True)]
        try:
            yield [wait.task for wait in held]
        finally:
            for key, wait in zip(keys, held, strict=True):
                self._release(key, wait)

    def _take(self, key: str, group: int) -> _Wait:
        wait = self._waits.get(key)
        if wait is None:
            wait = self._waits[key] = _Wait(asyncio.create_task(self._await_group(key, group)))
            wait.task.add_done_callback(lambda _: self._drop_unheld(key, wait))
        if wait.expiry is not None:
            wait.expiry.cancel()
            wait.expiry = None
        wait.num_holders += 1
        return wait

    def _release(self, key: str, wait: _Wait) -> None:
        wait.num_holders -= 1
        if wait.task.done():
            self._drop(key, wait)
        elif not wait.num_holders:
            wait.expiry = asyncio.get_running_loop().call_later(self._keep_seconds, self._drop, key, wait)

    def _drop_unheld(self, key: str, wait: _Wait) -> None:
        if not wait.num_holders:
            self._drop(key, wait)

    def _drop(self, key: str, wait: _Wait) -> None:
        if self._waits.get(key) is wait:
            del self._waits[key]
        if wait.expiry is not None:
            wait.expiry.cancel()
        if not wait.task.done():
            wait.task.cancel()
        elif not wait.task.cancelled():
            wait.task.exception()  # whoever held it has been told

    async def _await_group(self, workflow_id: str, group: int) -> GroupResult:
        handle = self._client.get_workflow_handle(workflow_id, result_type=GroupResult)
        try:
            result: GroupResult = await handle.result()
        except WorkflowFailureError as error:
            if isinstance(error.cause, (CancelledError, TerminatedError)):
                name = type(error.cause).__name__
                cause = Cause(kind=CauseKind.SKIPPED, error=name, message=f"group {group} was ended")
                return GroupResult(group=group, dropped=cause)
            raise find_terminal(error) from error
        return result
