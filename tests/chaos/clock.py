"""Wall clocks that can be set: those of all processes of the stack but Temporal's server (see clock.c).

As where the machines of a cluster do not agree on the time, or an administrator mends it.
"""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock.c")
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 60.0


@functools.cache
def find_missing() -> str:
    """Why clocks cannot be set here; empty if they can."""
    if not Path("/proc/self/maps").exists():
        return "only Linux is known to load a library before others in this way"
    return "" if any(map(shutil.which, _COMPILERS)) else "there is no C compiler here"


@dataclass(frozen=True)
class Clock:
    """Use `open_clock`."""

    library: Path
    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of a process whose clock this is to be, and of its children."""
        return {"LD_PRELOAD": str(self.library), "EVERROLL_CHAOS_CLOCK": str(self.file)}

    def move(self, seconds: float) -> None:
        """So far from the true time; 0 sets it right."""
        with self.file.open("r+b", buffering=0) as file:
            file.write(struct.pack("=q", int(seconds * 1e9)))


def open_clock(directory: Path) -> Clock | None:
    """A clock that goes right until it is moved; None where it cannot be made."""
    if find_missing():
        return None
    file = directory / "clock"
    file.write_bytes(struct.pack("=q", 0))
    return Clock(_compile(directory), file)


def _compile(directory: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)))
    library = directory / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=_COMPILE_SECONDS)
    return library
