"""Choose ports: the usual one where it is free, any free one otherwise.

Between choosing a port and listening on it lie seconds, in which another stack could choose the same one. Stacks of
one user therefore reserve their ports from each other, by a lock on a file for each.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_FREE_PORTS = range(20_000, 32_768)
"""Below those that systems give to outgoing connections, and to servers that ask for any: from 32,768 on Linux, 49,152
on macOS. One of these might be taken again before its server listens, for good by one of Temporal's own."""
_TRIES = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def choose_port(wanted: int) -> int:
    """`wanted` if it is free now, else a free port; 0 asks for a free one."""
    if wanted and is_free(wanted):
        return wanted
    # Not by the process' own numbers, of which forks have the same.
    for port in random.SystemRandom().sample(_FREE_PORTS, _TRIES):
        if is_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PortReservations:
    """The ports of one stack, reserved until `close`, or until the process ends."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or Path(tempfile.gettempdir(), f"everroll-ports-{os.getuid()}")
        self._handles: list[int] = []

    def __enter__(self) -> PortReservations:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()

    def choose(self, wanted: int) -> int:
        """`wanted` if it is free and no other stack's, else a free port; 0 asks for a free one."""
        port = choose_port(wanted)
        while not self._reserve(port):
            port = choose_port(0)
        return port

    def _reserve(self, port: int) -> bool:
        handle = os.open(self._directory / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._handles.append(handle)
        return True
