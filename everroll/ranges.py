"""Numbers of steps as people read them."""

from __future__ import annotations

from collections.abc import Iterable


def name_ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`; `none` if there are none."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges) or "none"
