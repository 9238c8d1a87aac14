"""Tables for the web UI's current details: aligned text in a code block, since it runs Markdown's cells together."""

from __future__ import annotations

from collections.abc import Sequence


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 0) -> list[str]:
    """Lines of a fenced block. The first `num_left` columns are aligned to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return ["```", *(_render_line(line, widths, num_left) for line in lines), "```"]


def _render_line(cells: Sequence[str], widths: Sequence[int], num_left: int) -> str:
    padded = [
        cell.ljust(width) if column < num_left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def show_count(count: int) -> str:
    """A number in at most six characters or so: 950, 12.3k, 4.56M."""
    if count < 10_000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 1_000_000 else f"{count / 1_000_000:.2f}M"
