"""Keep a set of processes running: start in stages, restart what ends by itself, stop in reverse order.

Knows nothing of what the processes are; see `stack` for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from everroll.local.process import ProcessSpec, RunningChild, describe_exit, read_log_tail
from everroll.local.restarts import CrashRecord, RestartPolicy
from everroll.local.starting import LocalStarter, Starter
from everroll.local.state import ProcessPhase, ProcessState, StackError

Report = Callable[[str], None]
"""Takes a line for people."""

_READY_POLL_SECONDS = 0.1
_CALLED_WRONGLY = 2
"""Exit code of Everroll's commands for what a person must mend: from the start, another try ends the same way."""


class Keeper:
    """Runs one process for as long as its task lives."""

    def __init__(
        self,
        spec: ProcessSpec,
        starter: Starter,
        log: Path,
        policy: RestartPolicy,
        report: Report,
        on_change: Callable[[], None],
    ) -> None:
        self.spec = spec
        self._starter = starter
        self.state = ProcessState(name=spec.name, phase=ProcessPhase.STARTING, log=str(log))
        self.healthy = asyncio.Event()
        self._has_served = False
        self._log = log
        self._crashes = CrashRecord(policy)
        self._report = report
        self._on_change = on_change

    async def run(self) -> None:
        """Start, restart, and on cancellation stop the process.

        Raises:
            StackError: it ended too often.
        """
        try:
            while True:
                await self._restart(*await self._run_once())
        except asyncio.CancelledError:
            self._change(ProcessPhase.STOPPED, identity=None)
            raise

    async def _run_once(self) -> tuple[bool, str]:
        """From start to end; returns whether it was ever healthy, and how it ended."""
        self.healthy.clear()
        child = await self._starter.start(self.spec, self._log)
        self._change(ProcessPhase.STARTING, identity=child.identity)
        end = asyncio.ensure_future(child.wait())
        try:
            problem = await self._await_healthy(child, end)
            if problem is None:
                code = await end
                problem = describe_exit(code)
                if code == _CALLED_WRONGLY and not self._has_served:
                    self._give_up(problem)
            return self.healthy.is_set(), problem
        finally:
            end.cancel()
            await child.stop()

    async def _restart(self, was_healthy: bool, last_exit: str) -> None:
        """Wait until the process may start again."""
        delay = self._crashes.add(asyncio.get_running_loop().time(), was_healthy=was_healthy)
        if delay is None:
            self._give_up(last_exit)
        self._report(f"{self.spec.name} {last_exit}; starting it again in {delay:.1f} s")
        restarts = self.state.restarts + 1
        self._change(ProcessPhase.RESTARTING, last_exit=last_exit, identity=None, restarts=restarts)
        await asyncio.sleep(delay)

    async def _await_healthy(self, child: RunningChild, end: asyncio.Future[int]) -> str | None:
        """Wait until it is healthy or has ended; returns a text if it was neither in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.spec.ready_timeout_seconds
        while loop.time() < deadline:
            if await self.spec.ready.is_ready(child.identity.pid) and not end.done():
                self.healthy.set()
                self._has_served = True
                where = f" at {self.spec.address}" if self.spec.address else ""
                self._report(f"{self.spec.name} is up{where} (pid {child.identity.pid})")
                self._change(ProcessPhase.HEALTHY)
                return None
            await asyncio.wait([end], timeout=_READY_POLL_SECONDS)
            if end.done():
                return None
        return f"did not serve within {self.spec.ready_timeout_seconds:.0f} s"

    def _change(self, phase: ProcessPhase, **values: object) -> None:
        self.state = self.state.model_copy(update={"phase": phase, **values})
        self._on_change()

    def _give_up(self, last_exit: str) -> NoReturn:
        self._change(ProcessPhase.FAILED, last_exit=last_exit, identity=None)
        tail = read_log_tail(self._log)
        raise StackError(f"{self.spec.name} {last_exit}, and does not come up; the end of {self._log}:\n{tail}")


class Supervisor:
    """A set of processes."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        logs: Path,
        report: Report,
        on_change: Callable[[], None],
        policy: RestartPolicy | None = None,
        starter: Starter | None = None,
    ) -> None:
        policy = policy or RestartPolicy()
        self._starter = starter or LocalStarter(logs, report)
        self.keepers = [
            Keeper(spec, self._starter, logs / f"{spec.name}.log", policy, report, on_change) for spec in specs
        ]
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start all processes; returns when each has been healthy.

        Raises:
            StackError: one does not come up. Call `stop` then, too.
        """
        await self._starter.prepare([keeper.spec for keeper in self.keepers])
        for stage in sorted({keeper.spec.stage for keeper in self.keepers}):
            for keeper in self._starting_with(stage):
                self._tasks[keeper.spec.name] = asyncio.create_task(keeper.run())
            healthy = asyncio.gather(*(keeper.healthy.wait() for keeper in self._stage(stage)))
            await self._wait_unless_failed(healthy)

    async def watch(self) -> None:
        """Wait until a process has failed for good.

        Raises:
            StackError: naming it.
        """
        await self._wait_unless_failed(asyncio.get_running_loop().create_future())

    async def stop(self) -> None:
        """Stop all processes, the last stage first; each within its own bounded time."""
        for stage in sorted({keeper.spec.stage for keeper in self.keepers}, reverse=True):
            names = [keeper.spec.name for keeper in self._stage(stage)]
            tasks = [self._tasks.pop(name) for name in names if name in self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._starter.close()

    def _starting_with(self, stage: int) -> list[Keeper]:
        """Whose turn it is, early or not, and who does not run yet: the stage that they begin with may be empty."""

        def first(spec: ProcessSpec) -> int:
            return spec.stage if spec.early_stage is None else spec.early_stage

        waiting = [keeper for keeper in self.keepers if keeper.spec.name not in self._tasks]
        return [keeper for keeper in waiting if first(keeper.spec) <= stage]

    def _stage(self, stage: int) -> list[Keeper]:
        return [keeper for keeper in self.keepers if keeper.spec.stage == stage]

    async def _wait_unless_failed(self, condition: asyncio.Future[Any]) -> None:
        try:
            await asyncio.wait([condition, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks.values():
                if task.done():
                    task.result()
        finally:
            condition.cancel()
