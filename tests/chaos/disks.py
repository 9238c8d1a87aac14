"""Small file systems of their own for what a run keeps, each of which can run full."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.machine import call

DISKS = ("journal", "store", "runs", "temporal")
"""Of the session server, of samples, of the trainer (run directories with their checkpoints), of Temporal."""
_SIZES = {"journal": "320m"}
"""Of the session server's more must be free than it keeps in reserve (`min_free_bytes`)."""
_SIZE = "96m"
_BALLAST = "ballast"
_PAGE_BYTES = 4096


@contextlib.contextmanager
def open_disks(parent: Path, *, mounted: bool) -> Iterator[None]:
    """The directories of `DISKS` below `parent`: file systems in memory if `mounted` (only inside of `machine`)."""
    with contextlib.ExitStack() as resources:
        for name in DISKS:
            directory = parent / name
            directory.mkdir(parents=True, exist_ok=True)
            if mounted:
                call("mount", "-t", "tmpfs", "-o", f"size={_SIZES.get(name, _SIZE)}", "tmpfs", str(directory))
                resources.callback(call, "umount", "--lazy", str(directory))
        yield


def fill(disk: Path) -> None:
    """Until there is no room, the last bytes too."""
    with (disk / _BALLAST).open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)
        file.seek(0, os.SEEK_END)
        for size in (_PAGE_BYTES, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def empty(disk: Path) -> None:
    (disk / _BALLAST).unlink(missing_ok=True)
