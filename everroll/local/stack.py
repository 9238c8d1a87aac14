"""A local stack: its processes under a supervisor, its state in a file, its right to run in a lock."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager

from everroll.local.identity import identify
from everroll.local.process import ProcessSpec
from everroll.local.restarts import RestartPolicy
from everroll.local.starting import Starter
from everroll.local.state import StackAddresses, StackDirectory, StackError, StackPhase, StackState
from everroll.local.supervisor import Report, Supervisor


class LocalStack:
    """Processes that this process supervises. Use `run_stack`, which also stops them."""

    def __init__(
        self,
        directory: StackDirectory,
        addresses: StackAddresses,
        admin_key: str,
        specs: Sequence[ProcessSpec],
        report: Report,
        policy: RestartPolicy | None = None,
        starter: Starter | None = None,
    ) -> None:
        self.directory = directory
        self.addresses = addresses
        self._supervisor = Supervisor(specs, directory.logs, report, self._write_state, policy, starter)
        self._admin_key = admin_key
        self._phase = StackPhase.STARTING
        self._failure: str | None = None

    async def start(self) -> None:
        """Start all processes and wait until each serves.

        Raises:
            StackError: one does not come up.
        """
        self._write_state()
        await self._noting_failure(self._supervisor.start())
        self._enter(StackPhase.HEALTHY)

    async def watch(self) -> None:
        """Wait until a process has failed for good.

        Raises:
            StackError: naming it.
        """
        await self._noting_failure(self._supervisor.watch())

    async def stop(self) -> None:
        """Stop all processes: workers first, Temporal last."""
        if self._phase is not StackPhase.FAILED:
            self._enter(StackPhase.STOPPING)
        await self._supervisor.stop()

    async def _noting_failure(self, work: Awaitable[None]) -> None:
        try:
            await work
        except StackError as error:
            self._failure = str(error)
            self._enter(StackPhase.FAILED)
            raise

    def _enter(self, phase: StackPhase) -> None:
        self._phase = phase
        self._write_state()

    def _write_state(self) -> None:
        supervisor = identify(os.getpid())
        assert supervisor is not None
        state = StackState(
            phase=self._phase,
            supervisor=supervisor,
            addresses=self.addresses,
            admin_key=self._admin_key,
            processes=[keeper.state for keeper in self._supervisor.keepers],
            failure=self._failure,
        )
        self.directory.write_state(state)


@asynccontextmanager
async def run_stack(stack: LocalStack) -> AsyncIterator[LocalStack]:
    """A running stack inside the block; afterwards none of its processes is left, however the block ends.

    The caller holds the directory's lock.

    Raises:
        StackError: a process does not come up.
    """
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()
        stack.directory.state_file.unlink(missing_ok=True)
