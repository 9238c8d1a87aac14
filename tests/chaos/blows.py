"""What is done to a run's processes: kills and freezes. Each says what it does. `outages` has what else can break."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from typing import Protocol

from everroll.contracts import names
from everroll.local.identity import ProcessIdentity, send_signal
from tests.chaos.world import RUN, World

_STRUCK_SECONDS = 60.0
_POLL_SECONDS = 0.02
_ALONE_SECONDS = 30.0
_TRAINER = "worker-trainer"


class MissedError(Exception):
    """The blow met nobody; the text says which."""


class Blow(Protocol):
    """Something that breaks."""

    @property
    def kind(self) -> str:
        """What it is counted as."""
        ...

    @property
    def text(self) -> str:
        """What it does, for people and for the report of a breach."""
        ...

    @property
    def breaks(self) -> tuple[str, ...]:
        """Processes that lose what is in their memory, and links (`link NAME`) that lose what is on its way."""
        ...

    async def strike(self, world: World) -> None:
        """Do it, and undo what does not mend itself.

        Raises:
            MissedError: it met nobody.
        """
        ...


@dataclass(frozen=True)
class Kill:
    """SIGKILL of processes, at once. The supervisor starts them again."""

    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return f"kill {self.names[0]}" if len(self.names) == 1 else "kill two"

    @property
    def text(self) -> str:
        return f"SIGKILL {' and '.join(self.names)}"

    @property
    def breaks(self) -> tuple[str, ...]:
        return self.names

    async def strike(self, world: World) -> None:
        found = world.stack.find_each(self.names)  # in one look: what was waited for lasts milliseconds
        killed = {name for name, process in found.items() if process and send_signal(process, signal.SIGKILL)}
        for name in self.names:
            if name not in killed:  # it was coming back, or ended just now: its successor, then
                await _signal(world, name, signal.SIGKILL)


@dataclass(frozen=True)
class KillEverything:
    """SIGKILL of all processes at the same instant, as when the machine is lost; then `everroll up` again."""

    pause_seconds: float = 0.0
    kind = "everything"
    breaks = ("session-server", "engine")

    @property
    def text(self) -> str:
        return "SIGKILL everything, and start again"

    async def strike(self, world: World) -> None:
        await world.stack.kill_everything()
        await asyncio.sleep(self.pause_seconds)
        world.stack.launch()
        await world.stack.await_healthy()


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP, and SIGCONT later: a process that is taken for dead and comes back."""

    name: str
    seconds: float
    breaks = ()

    @property
    def kind(self) -> str:
        return f"freeze {self.name}"

    @property
    def text(self) -> str:
        return f"SIGSTOP {self.name} for {self.seconds:.1f} s"

    async def strike(self, world: World) -> None:
        frozen = await _signal(world, self.name, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            if world.stack.find(self.name) == frozen:
                world.stack.signal(self.name, signal.SIGCONT)


@dataclass(frozen=True)
class TakeOver:
    """A trainer is frozen until another one, elsewhere, has been given its step; then it comes back.

    For a while both are at work on the same step. Then one of them is killed, and in the end the one from elsewhere.
    """

    both_seconds: float
    """How long the two are left alone with each other."""
    kills_the_first: bool
    kind = "take-over"
    breaks = ()

    @property
    def text(self) -> str:
        loser = "the first" if self.kills_the_first else "the second"
        return (
            f"SIGSTOP {_TRAINER} until a second one was given its step, "
            f"and SIGKILL {loser} {self.both_seconds:.1f} s after it came back"
        )

    async def strike(self, world: World) -> None:
        first = await _signal(world, _TRAINER, signal.SIGSTOP)
        second = world.stack.start_beside(_TRAINER)
        try:
            try:
                await _await_taken(world, second)
            finally:
                send_signal(first, signal.SIGCONT)
            await asyncio.sleep(self.both_seconds)
            if self.kills_the_first:
                send_signal(first, signal.SIGKILL)
                await _await_step(world)
        finally:
            send_signal(second, signal.SIGKILL)


@dataclass(frozen=True)
class Together:
    """Several blows at the same moment."""

    blows: tuple[Blow, ...]
    kind: str

    @property
    def text(self) -> str:
        return "; and ".join(blow.text for blow in self.blows)

    @property
    def breaks(self) -> tuple[str, ...]:
        return tuple(name for blow in self.blows for name in blow.breaks)

    async def strike(self, world: World) -> None:
        await asyncio.gather(*(blow.strike(world) for blow in self.blows))


async def _await_process(world: World, name: str) -> None:
    """Until there is one to strike at; a process that was killed before may be coming back."""
    async with asyncio.timeout(_STRUCK_SECONDS):
        while world.stack.find(name) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


async def _signal(world: World, name: str, number: signal.Signals) -> ProcessIdentity:
    """Signal the process of that name, or, if it ends at this moment, its successor."""
    while True:
        await _await_process(world, name)
        struck = world.stack.signal(name, number)
        if struck is not None:
            return struck


async def _await_taken(world: World, process: ProcessIdentity) -> None:
    """Until Temporal has given the process something that another one had begun.

    Raises:
        MissedError: it has not, within a few heartbeat timeouts.
    """
    handle = world.client.temporal.get_workflow_handle(names.run_workflow_id(RUN))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STRUCK_SECONDS):
            while not world.ended.is_set():
                pending = (await handle.describe()).raw_description.pending_activities
                if any(one.attempt > 1 and one.last_worker_identity.startswith(f"{process.pid}@") for one in pending):
                    return
                await asyncio.sleep(_POLL_SECONDS)
    raise MissedError("the second trainer was not given the step")


async def _await_step(world: World) -> None:
    """Until a step more is on record: the one before was acknowledged. Not for ever."""
    last = world.count_steps()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ALONE_SECONDS):
            while world.count_steps() == last and not world.ended.is_set():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
