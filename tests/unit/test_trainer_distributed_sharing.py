"""Which process computes which samples: all of them once, evenly, and equally many passes where that is needed."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from everroll.contracts.spec import LoraSpec, TrainSection
from tests.trainer_helpers import build_sample
from trainer.distributed.sharing import plan_passes, share_rows
from trainer.microbatches import Row, split_rows

LENGTHS = [23, 9, 9, 14, 30, 8, 17, 12]


def build_rows(lengths: list[int]) -> list[Row]:
    rng = np.random.default_rng(0)
    return [Row(build_sample(rng, length), advantage=0.5, token_weight=0.1) for length in lengths]


def split(rows: object) -> list[list[Row]]:
    return split_rows(rows, 32)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 11])
def test_every_sample_is_computed_once(size: int) -> None:
    rows = build_rows(LENGTHS)
    plans = [plan_passes(rows, split, rank, size, equally_many=False) for rank in range(size)]
    computed = [id(row) for plan in plans for item in plan for row in item.rows]
    assert sorted(computed) == sorted(map(id, rows))
    assert all(item.counts for plan in plans for item in plan)


def test_shares_have_about_equally_many_tokens() -> None:
    shares = share_rows(build_rows(LENGTHS), 2)
    tokens = [sum(row.sample.num_tokens for row in share) for share in shares]
    assert abs(tokens[0] - tokens[1]) <= 2


@pytest.mark.parametrize("size", [2, 3, 11])
def test_sharded_processes_make_equally_many_passes(size: int) -> None:
    """The missing ones weigh nothing and are not measured; a process without samples makes only such."""
    rows = build_rows(LENGTHS)
    plans = [plan_passes(rows, split, rank, size, equally_many=True) for rank in range(size)]
    assert len({len(plan) for plan in plans}) == 1
    assert sum(len(item.rows) for plan in plans for item in plan if item.counts) == len(rows)
    for item in (item for plan in plans for item in plan if not item.counts):
        assert [(row.advantage, row.token_weight) for row in item.rows] == [(0.0, 0.0)]


def test_no_samples_are_no_passes() -> None:
    assert plan_passes([], split, 0, 2, equally_many=True) == []


def test_sharded_adapters_do_not_go_with_a_divergence() -> None:
    with pytest.raises(ValidationError, match='needs parallel = "ddp"'):
        TrainSection(parallel="fsdp", kl_coef=0.1, lora=LoraSpec(rank=4))
    assert TrainSection(parallel="fsdp", lora=LoraSpec(rank=4)).parallel == "fsdp"
