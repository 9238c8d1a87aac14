"""What is done to a run: kills, freezes, and links that break. Each blow says aloud what it did."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.chaos.world import World

_STRUCK_SECONDS = 60.0
_POLL_SECONDS = 0.02
_CHUNK_BYTES = 1 << 20


class Blow(Protocol):
    """Something that breaks."""

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
class ResetLinks:
    """RST on every connection of the links."""

    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"reset the connections of {' and '.join(self.names)}"

    async def strike(self, world: World) -> None:
        for name in self.names:
            world.links[name].reset()


@dataclass(frozen=True)
class StallLinks:
    """A partition that drops packets: nothing goes through for a while, and nobody is told."""

    names: tuple[str, ...]
    seconds: float

    @property
    def text(self) -> str:
        return f"stall {' and '.join(self.names)} for {self.seconds:.1f} s"

    async def strike(self, world: World) -> None:
        for name in self.names:
            world.links[name].stall()
        try:
            await asyncio.sleep(self.seconds)
        finally:
            for name in self.names:
                await world.links[name].heal()


@dataclass(frozen=True)
class CutLinks:
    """A partition that refuses: connections are reset and new ones refused for a while."""

    names: tuple[str, ...]
    seconds: float

    @property
    def text(self) -> str:
        return f"cut {' and '.join(self.names)} for {self.seconds:.1f} s"

    async def strike(self, world: World) -> None:
        for name in self.names:
            world.links[name].cut()
        try:
            await asyncio.sleep(self.seconds)
        finally:
            for name in self.names:
                await world.links[name].heal()


@dataclass(frozen=True)
class Together:
    """Several blows at the same moment."""

    blows: tuple[Blow, ...]

    @property
    def text(self) -> str:
        return "; and ".join(blow.text for blow in self.blows)

    async def strike(self, world: World) -> None:
        await asyncio.gather(*(blow.strike(world) for blow in self.blows))


@dataclass(frozen=True)
class FillDisk:
    """No room is left on the file system of the stack for a while. Only where the world lies on one of its own."""

    seconds: float

    @property
    def text(self) -> str:
        return f"fill the disk for {self.seconds:.1f} s"

    async def strike(self, world: World) -> None:
        ballast = world.directory / "ballast"
        try:
            await asyncio.to_thread(_fill, ballast)
            await asyncio.sleep(self.seconds)
        finally:
            ballast.unlink(missing_ok=True)


def _fill(ballast: Path) -> None:
    """Write until there is no room, the last kilobytes too."""
    with ballast.open("wb", buffering=0) as file:
        for size in (_CHUNK_BYTES, 4096, 1):
            with contextlib.suppress(OSError):
                while shutil.disk_usage(ballast.parent).free >= 0:
                    file.write(b"\0" * size)


async def _await_process(world: World, name: str) -> None:
    """Until there is one to strike at; a process that was killed before may be coming back."""
    async with asyncio.timeout(_STRUCK_SECONDS):
        while world.stack.find(name) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


def describe(blows: Sequence[Blow]) -> str:
    return ", ".join(blow.text for blow in blows)


NO_ROOM = errno.ENOSPC
