"""What a run decides by itself is written to its directory, so that it outlives Temporal's history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.training import RunState
    from workflows.calls import RunCalls

_GROUPS_AT_ONCE = 64


class Recorder:
    """Writes in order, one call at a time. What is not written yet is carried in the state through continue-as-new."""

    def __init__(self, state: RunState, calls: RunCalls, read_spec: Callable[[], RunSpec]) -> None:
        self._state = state
        self._calls = calls
        self._read_spec = read_spec
        self._lock = asyncio.Lock()

    @property
    def is_due(self) -> bool:
        """Whether something waits to be written, and nobody is at it."""
        return bool(self._state.unrecorded or self._state.unrecorded_steerings) and not self._lock.locked()

    async def flush(self) -> None:
        """Return when everything that waits is on disk.

        Raises:
            ActivityError: it could not be written.
        """
        async with self._lock:
            while self._state.unrecorded or self._state.unrecorded_steerings:
                settled = self._state.unrecorded[:_GROUPS_AT_ONCE]
                steerings = list(self._state.unrecorded_steerings)
                await self._calls.record(settled, steerings, self._read_spec() if steerings else None)
                del self._state.unrecorded[: len(settled)]
                del self._state.unrecorded_steerings[: len(steerings)]
