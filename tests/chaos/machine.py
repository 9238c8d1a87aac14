"""A machine of its own for chaos: namespaces for mounts and network that end with the last process inside.

Inside, file systems can be mounted and links between nodes be unplugged without anybody else seeing it. Needs root, or
user namespaces, and `unshare`, `ip` and `mount`; where that is missing, chaos goes without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_INSIDE = "EVERROLL_CHAOS_INSIDE"
_TOOLS = ("unshare", "nsenter", "ip", "mount", "umount")
_PROBE = "ip link set lo up && mount -t tmpfs -o size=64k tmpfs /mnt && ip link add ever0 type veth peer name ever1"
_SECONDS = 20.0


def is_inside() -> bool:
    return os.environ.get(_INSIDE) == str(os.getpid())


def enter(arguments: Sequence[str]) -> str:
    """Start this program again inside, as `python ARGUMENTS`; returns only where that is not possible: why not."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)} here"
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    unshare = ("unshare", *user, "--mount", "--net", "--propagation", "private")
    probe = subprocess.run(
        [*unshare, "sh", "-c", _PROBE], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if probe.returncode != 0:
        return probe.stderr.strip() or "unshare failed"
    os.environ[_INSIDE] = str(os.getpid())  # unshare and python take this process's place, and keep its id
    os.execvp(unshare[0], [*unshare, sys.executable, *arguments])
    raise AssertionError("exec returned")


def settle() -> None:
    """Inside, before anything else: let processes reach each other over loopback."""
    call("ip", "link", "set", "lo", "up")


def call(*command: str) -> None:
    """Run a tool of the system.

    Raises:
        RuntimeError: it failed; the text is what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
