"""Whether a process itself listens on a port: a health check could be answered by a stranger that has the port."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def listens_on(pid: int, port: int) -> bool:
    """Whether process `pid` listens on TCP port `port`; true where the system does not tell."""
    if sys.platform != "linux":
        return True
    inodes = set(_listening_inodes(pid, port))
    return any(inode in inodes for inode in _socket_inodes(pid))


def _listening_inodes(pid: int, port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on the port, in the process's network namespace."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _socket_inodes(pid: int) -> Iterator[str]:
    """Inodes of the sockets that the process holds open."""
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]
