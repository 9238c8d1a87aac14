"""What is done to a run: kills, freezes, broken links, lost nodes, full disks, wrong clocks. Each says what it does."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Literal, Protocol

from tests.chaos.disks import empty, fill
from tests.chaos.world import World

_STRUCK_SECONDS = 60.0
_POLL_SECONDS = 0.02


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

    async def strike(self, world: World) -> None:
        """Do it, and undo what does not mend itself."""
        ...


@dataclass(frozen=True)
class Kill:
    """SIGKILL of processes, at once. The supervisor starts them again."""

    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return "kill" if len(self.names) == 1 else "kill two"

    @property
    def text(self) -> str:
        return f"SIGKILL {' and '.join(self.names)}"

    async def strike(self, world: World) -> None:
        for name in self.names:
            await _await_process(world, name)
        for name in self.names:
            world.stack.signal(name, signal.SIGKILL)


@dataclass(frozen=True)
class KillEverything:
    """SIGKILL of all processes at the same instant, as when the machine is lost; then `everroll up` again."""

    pause_seconds: float = 0.0
    kind = "everything"

    @property
    def text(self) -> str:
        return "SIGKILL everything, and start again"

    async def strike(self, world: World) -> None:
        await world.stack.kill_everything()
        await asyncio.sleep(self.pause_seconds)
        world.stack.launch()
        await world.stack.await_healthy()


@dataclass(frozen=True)
class ResetLinks:
    """RST on every connection of the links."""

    names: tuple[str, ...]
    kind = "reset"

    @property
    def text(self) -> str:
        return f"reset the connections of {' and '.join(self.names)}"

    async def strike(self, world: World) -> None:
        for name in self.names:
            world.links[name].reset()


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP, and SIGCONT later: a process that is taken for dead and comes back."""

    name: str
    seconds: float
    kind = "freeze"

    @property
    def text(self) -> str:
        return f"SIGSTOP {self.name} for {self.seconds:.1f} s"

    async def strike(self, world: World) -> None:
        await _await_process(world, self.name)
        frozen = world.stack.signal(self.name, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            if frozen is not None and world.stack.find(self.name) == frozen:
                world.stack.signal(self.name, signal.SIGCONT)


@dataclass(frozen=True)
class Lasting:
    """Something that is broken for a while, and whole again afterwards."""

    seconds: float

    async def strike(self, world: World) -> None:
        try:
            await self.begin(world)
            await asyncio.sleep(self.seconds)
        finally:
            await self.end(world)

    async def begin(self, world: World) -> None:
        raise NotImplementedError

    async def end(self, world: World) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Partition(Lasting):
    """Links that carry nothing: `stall` drops packets and tells nobody, `cut` resets and refuses connections."""

    names: tuple[str, ...]
    kind: Literal["stall", "cut"]

    @property
    def text(self) -> str:
        return f"{self.kind} {' and '.join(self.names)} for {self.seconds:.1f} s"

    async def begin(self, world: World) -> None:
        for name in self.names:
            link = world.links[name]
            if self.kind == "stall":
                link.stall()
            else:
                link.cut()

    async def end(self, world: World) -> None:
        for name in self.names:
            await world.links[name].heal()


@dataclass(frozen=True)
class LoseNode(Lasting):
    """The cable of the first rollout worker's node is unplugged: its packets are lost, its connections stay open."""

    kind = "node-lost"

    @property
    def text(self) -> str:
        return f"unplug the node of worker-rollout for {self.seconds:.1f} s"

    async def begin(self, world: World) -> None:
        assert world.node is not None
        world.node.unplug()

    async def end(self, world: World) -> None:
        assert world.node is not None
        world.node.plug()


@dataclass(frozen=True)
class FillDisk(Lasting):
    """No room is left on one of the world's disks."""

    disk: str

    @property
    def kind(self) -> str:
        return f"full {self.disk}"

    @property
    def text(self) -> str:
        return f"fill the disk of {self.disk} for {self.seconds:.1f} s"

    async def begin(self, world: World) -> None:
        world.full.add(self.disk)
        await asyncio.to_thread(fill, world.disks / self.disk)

    async def end(self, world: World) -> None:
        empty(world.disks / self.disk)
        world.full.discard(self.disk)


@dataclass(frozen=True)
class MoveClock(Lasting):
    """The wall clock of every process but Temporal's server jumps, and jumps back."""

    by_seconds: float
    kind = "clock"

    @property
    def text(self) -> str:
        return f"set all clocks but Temporal's by {self.by_seconds:+.0f} s for {self.seconds:.1f} s"

    async def begin(self, world: World) -> None:
        assert world.clock is not None
        world.clock.move(self.by_seconds)

    async def end(self, world: World) -> None:
        assert world.clock is not None
        world.clock.move(0)


@dataclass(frozen=True)
class Together:
    """Several blows at the same moment."""

    blows: tuple[Blow, ...]

    @property
    def kind(self) -> str:
        return " and ".join(blow.kind for blow in self.blows)

    @property
    def text(self) -> str:
        return "; and ".join(blow.text for blow in self.blows)

    async def strike(self, world: World) -> None:
        await asyncio.gather(*(blow.strike(world) for blow in self.blows))


async def _await_process(world: World, name: str) -> None:
    """Until there is one to strike at; a process that was killed before may be coming back."""
    async with asyncio.timeout(_STRUCK_SECONDS):
        while world.stack.find(name) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
