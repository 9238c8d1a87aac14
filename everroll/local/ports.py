"""Choose ports: the usual one where it is free, any free one otherwise."""

from __future__ import annotations

import socket
from collections.abc import Collection


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


def choose_port(wanted: int, taken: Collection[int] = ()) -> int:
    """`wanted` if it is free and not in `taken`, else a free port; 0 asks for a free one."""
    if wanted and wanted not in taken and is_free(wanted):
        return wanted
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
