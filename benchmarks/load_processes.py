"""What a process takes at one moment, read from Linux's /proc: memory, processor time, open files, threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Of one process, or the sum over several."""

    rss_bytes: int = 0
    """Resident memory; pages that several share count for each."""
    cpu_seconds: float = 0.0
    """Since it started."""
    num_files: int = 0
    num_threads: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.rss_bytes + other.rss_bytes,
            self.cpu_seconds + other.cpu_seconds,
            self.num_files + other.num_files,
            self.num_threads + other.num_threads,
        )


def read_usage(pid: int) -> Usage:
    """What the process and its descendants take now; nothing for one that has ended."""
    total = Usage()
    for member in _walk(pid):
        total += _read_one(member)
    return total


def _walk(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in found:
            yield from _walk(int(child))


def _read_one(pid: int) -> Usage:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        num_files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return Usage()
    cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
    return Usage(int(fields[21]) * _PAGE_BYTES, cpu_seconds, num_files, int(fields[17]))


def measure_files(path: Path) -> int:
    """Bytes of a file and of those beside it that carry its name and an ending (a database's log and index)."""
    total = 0
    for part in path.parent.glob(f"{path.name}*"):
        try:
            total += part.stat().st_size
        except FileNotFoundError:  # a log that was merged just now
            continue
    return total


def fit_slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Least squares: growth of the values per unit of time; 0 of fewer than two points."""
    if len(times) < 2:
        return 0.0
    mean_time, mean_value = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - mean_time) ** 2 for time in times)
    moved = sum((time - mean_time) * (value - mean_value) for time, value in zip(times, values, strict=True))
    return moved / spread if spread else 0.0
