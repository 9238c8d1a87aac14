"""What is done to what lies between a run's processes and below them: links, nodes, disks, clocks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import ClassVar

from tests.chaos.blows import MissedError
from tests.chaos.disks import empty, fill
from tests.chaos.world import World

_LOOK_SECONDS = 0.2
_MET_SECONDS = 20.0
"""How much longer a disk stays full until somebody has met it."""


@dataclass(frozen=True)
class ResetLinks:
    """RST on every connection of the links."""

    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return f"reset {self.names[0]}" if len(self.names) == 1 else "reset two"

    @property
    def text(self) -> str:
        return f"reset the connections of {' and '.join(self.names)}"

    @property
    def breaks(self) -> tuple[str, ...]:
        return tuple(f"link {name}" for name in self.names)

    async def strike(self, world: World) -> None:
        for name in self.names:
            world.links[name].reset()


@dataclass(frozen=True)
class Lasting:
    """Something that is broken for a while, and whole again afterwards."""

    seconds: float
    breaks: ClassVar[tuple[str, ...]] = ()

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
class Stall(Lasting):
    """Links that drop every packet, and tell nobody: what was sent is held back, new connections have no answer."""

    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return f"stall {self.names[0]}" if len(self.names) == 1 else "stall two"

    @property
    def text(self) -> str:
        return f"stall {' and '.join(self.names)} for {self.seconds:.1f} s"

    async def begin(self, world: World) -> None:
        for name in self.names:
            world.links[name].stall()

    async def end(self, world: World) -> None:
        for name in self.names:
            await world.links[name].heal()


@dataclass(frozen=True)
class Cut(Lasting):
    """Links whose connections are reset, and that refuse new ones."""

    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return f"cut {self.names[0]}" if len(self.names) == 1 else "cut two"

    @property
    def text(self) -> str:
        return f"cut {' and '.join(self.names)} for {self.seconds:.1f} s"

    @property
    def breaks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"link {name}" for name in self.names)

    async def begin(self, world: World) -> None:
        for name in self.names:
            world.links[name].cut()

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

    async def strike(self, world: World) -> None:
        """Until somebody has met it, for so long at least.

        Raises:
            MissedError: nobody did.
        """
        before = world.count_refusals()
        try:
            await self.begin(world)
            await asyncio.sleep(self.seconds)
            deadline = time.monotonic() + _MET_SECONDS
            while world.count_refusals() == before and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            await self.end(world)
        if world.count_refusals() == before:
            raise MissedError(f"nobody wrote to the full disk of {self.disk}")

    async def begin(self, world: World) -> None:
        world.full.add(self.disk)
        world.was_full = True
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
        world.clock_moved = True
        world.clock.move(self.by_seconds)

    async def end(self, world: World) -> None:
        assert world.clock is not None
        world.clock.move(0)
