"""Kill the processes of a local stack, one after the other, and say so.

The next one is killed a few seconds after the last one is back and the run has taken a step, so that what is shown is
recovery, and not a stack that never comes up. Each process has its turn before any is killed again; when all have had
theirs, all are killed at once, and so on.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from everroll.contracts.training import RunStatus
from everroll.local.identity import ProcessIdentity, send_signal
from everroll.local.state import ProcessPhase, ProcessState, StackDirectory, StackError

EVERYTHING = "everything"
_PAUSE_SECONDS = (2.0, 5.0)
_BACK_SECONDS = 300.0
_STEP_SECONDS = 60.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Recovery:
    """A kill, and how long it took until what was killed served again."""

    victim: str
    """A process, or `EVERYTHING`."""
    seconds: float


class Killer:
    """Kills until it is cancelled."""

    def __init__(
        self,
        directory: StackDirectory,
        seed: int,
        say: Callable[[str], None],
        find_status: Callable[[], RunStatus | None],
    ) -> None:
        """`find_status` gives what is known of the run at that moment."""
        self.recoveries: list[Recovery] = []
        self._directory = directory
        self._rng = random.Random(f"killer {seed}")
        self._say = say
        self._find_status = find_status
        self._next: list[str] = []

    async def run(self) -> None:
        """Kill, wait until it is back, wait a little, and so on.

        Raises:
            StackError: what was killed did not come back.
        """
        while True:
            step = self._count_steps()
            await self._strike(self._draw())
            await asyncio.sleep(self._rng.uniform(*_PAUSE_SECONDS))
            await self._await_step(step)

    def _count_steps(self) -> int:
        status = self._find_status()
        return status.step if status else 0

    async def _await_step(self, last: int) -> None:
        """Until the run has got beyond that step, or has not for a while."""
        deadline = asyncio.get_running_loop().time() + _STEP_SECONDS
        while self._count_steps() <= last and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    def _describe(self) -> str:
        status = self._find_status()
        return f"in step {status.step + 1}, {status.phase.value}" if status else "before the first step"

    def _draw(self) -> str:
        """The next victim: each process once, in a drawn order, and then everything."""
        if not self._next:
            processes = [process.name for process in self._processes()]
            self._rng.shuffle(processes)
            self._next = [EVERYTHING, *processes]
        return self._next.pop()

    async def _strike(self, victim: str) -> None:
        struck = [process for process in self._processes() if victim in (EVERYTHING, process.name)]
        before = {process.name: process.identity for process in struck if process.identity is not None}
        pids = ", ".join(str(identity.pid) for identity in before.values())
        self._say(f"SIGKILL  {victim} (pid {pids}), {self._describe()}")
        loop = asyncio.get_running_loop()
        started = loop.time()
        for identity in before.values():
            send_signal(identity, signal.SIGKILL)
        while not self._are_back(before):
            if loop.time() - started > _BACK_SECONDS:
                raise StackError(f"{victim} did not come back within {_BACK_SECONDS:.0f} s after it was killed")
            await asyncio.sleep(_LOOK_SECONDS)
        seconds = loop.time() - started
        self.recoveries.append(Recovery(victim, seconds))
        self._say(f"back     {victim} after {seconds:.1f} s")

    def _are_back(self, before: dict[str, ProcessIdentity]) -> bool:
        """Whether each has a successor that serves."""
        now = {process.name: process for process in self._processes()}
        return all(
            now[name].phase is ProcessPhase.HEALTHY and now[name].identity != identity
            for name, identity in before.items()
        )

    def find_spared(self) -> list[str]:
        """The processes that were not killed, each by itself, or had not come back when the killing ended."""
        back = {recovery.victim for recovery in self.recoveries}
        return [process.name for process in self._processes() if process.name not in back]

    def _processes(self) -> Sequence[ProcessState]:
        state = self._directory.read_state()
        return [] if state is None else state.processes


def summarize(recoveries: Sequence[Recovery], spared: Sequence[str]) -> str:
    """`9 kills (engine 2, temporal 1, ...); what was killed ...`, and what was spared."""
    if not recoveries:
        return "Nothing was killed and came back: the run was over too soon to show anything"
    victims = sorted({recovery.victim for recovery in recoveries})
    counts = ", ".join(f"{name} {sum(item.victim == name for item in recoveries)}" for name in victims)
    seconds = median(recovery.seconds for recovery in recoveries)
    told = f"{len(recoveries)} kills ({counts}); what was killed served again after {seconds:.1f} s (median)"
    if spared:
        told += f". The run was over too soon for {', '.join(spared)}, which had not been killed and come back"
    return told
