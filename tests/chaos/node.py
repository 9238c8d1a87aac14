"""Another node: a network namespace with a cable to this one, which can be unplugged.

While it is, packets are lost both ways and nobody is told: no RST, no FIN, connections stay open at both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from everroll.local.process import launch_with_parent
from tests.chaos.machine import call

HERE = "10.211.1.1"
"""Where both sides reach what listens on this one, the cable being plugged in or not."""
_END, _FAR_END = "10.211.0.1", "10.211.0.2"
_CABLE = ("ever0", "ever1")
_CLONE_NEWNET = 0x40000000
_UP_SECONDS = 10.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Node:
    """Use `open_node`."""

    namespace: Path
    """What a process enters by (`enter_namespace`)."""

    def unplug(self) -> None:
        call("ip", "link", "set", _CABLE[0], "down")

    def plug(self) -> None:
        call("ip", "link", "set", _CABLE[0], "up")


@contextlib.asynccontextmanager
async def open_node() -> AsyncIterator[Node]:
    """A node that lasts as long as the block. Only inside of `machine`."""
    keeper = subprocess.Popen(  # noqa: ASYNC220 (its parent must be this thread: it dies with it)
        launch_with_parent("unshare", "--net", "sleep", "infinity")
    )
    try:
        namespace = Path(f"/proc/{keeper.pid}/ns/net")
        await _await_namespace(namespace)
        call("ip", "link", "add", _CABLE[0], "type", "veth", "peer", "name", _CABLE[1], "netns", str(keeper.pid))
        call("ip", "address", "replace", f"{HERE}/32", "dev", "lo")
        call("ip", "address", "add", f"{_END}/30", "dev", _CABLE[0])
        call("ip", "link", "set", _CABLE[0], "up")
        there = ("nsenter", f"--net={namespace}", "ip")
        call(*there, "address", "add", f"{_FAR_END}/30", "dev", _CABLE[1])
        call(*there, "link", "set", _CABLE[1], "up")
        call(*there, "link", "set", "lo", "up")
        call(*there, "route", "add", HERE, "via", _END)
        yield Node(namespace)
    finally:
        keeper.kill()
        await asyncio.to_thread(keeper.wait, _UP_SECONDS)
        with contextlib.suppress(RuntimeError):  # it goes with the namespace, sooner or later
            call("ip", "link", "delete", _CABLE[0])


async def _await_namespace(namespace: Path) -> None:
    own = os.readlink("/proc/self/ns/net")
    async with asyncio.timeout(_UP_SECONDS):
        while os.readlink(namespace) == own:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


def enter_namespace(namespace: Path) -> None:
    """Take this process, or rather its calling thread, to the node.

    Raises:
        OSError: it may not.
    """
    handle = os.open(namespace, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)
