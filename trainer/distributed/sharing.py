"""Which process computes which samples of an update. Pure, and the same on every process, so nothing is exchanged.

The weight of each sampled token is fixed for the whole update before it is shared out, so the sum of all processes'
gradients is the gradient of one process, whatever the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer.microbatches import Row

Split = Callable[[Sequence[Row]], list[list[Row]]]
"""Divides the rows of one process into micro-batches."""


@dataclass(frozen=True)
class Pass:
    """One forward (and backward) pass of one process."""

    rows: list[Row]
    counts: bool = True
    """False for a filler: weight 0, and left out of the metrics."""


def share_rows(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Divide rows so that processes get about equally many tokens: the longest row to whom has least so far."""
    shares: list[list[Row]] = [[] for _ in range(size)]
    loads = [0] * size
    for row in sorted(rows, key=lambda row: -row.sample.num_tokens):  # stable: equal lengths keep their order
        lightest = min(range(size), key=lambda rank: loads[rank])
        shares[lightest].append(row)
        loads[lightest] += row.sample.num_tokens
    return shares


def plan_passes(rows: Sequence[Row], split: Split, rank: int, size: int, *, equally_many: bool) -> list[Pass]:
    """The passes of process `rank`.

    `equally_many` is for sharded models, whose parameters are gathered in every pass: there each process makes as many
    passes as the one with most, the missing ones over a sample of weight 0.
    """
    if not rows:
        return []
    if size == 1:
        return [Pass(part) for part in split(rows)]
    plans = [split(share) if share else [] for share in share_rows(rows, size)]
    passes = [Pass(part) for part in plans[rank]]
    if equally_many:
        shortest = min(rows, key=lambda row: row.sample.num_tokens)
        filler = Pass([replace(shortest, advantage=0.0, token_weight=0.0)], counts=False)
        passes += [filler] * (max(len(plan) for plan in plans) - len(passes))
    return passes
