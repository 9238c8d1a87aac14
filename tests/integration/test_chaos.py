"""A small, seeded part of `make chaos`: a run on real processes that are killed while it trains, judged as there.

The rounds played here are those that once found a breach; what they found is said with each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.blows import Kill
from tests.chaos.moments import sample_stored, turn_recorded
from tests.chaos.plan import ROLLOUT, Strike, draw_round
from tests.chaos.rounds import Baselines, play_round
from tests.chaos.world import Size

SMALL = Size(num_steps=3, groups_per_step=2, episodes_per_group=4, continue_as_new_events=60)


@pytest.mark.timeout(600)
async def test_a_killed_run_ends_with_the_weights_of_a_clean_one(tmp_path: Path) -> None:
    """The session server dies between record and answer, then the rollout workers between store and acknowledgement.

    Found at first: members whose session server was away were drawn anew, with other tokens.
    """
    strikes = [
        Strike(turn_recorded(), Kill(("session-server",))),
        Strike(sample_stored(), Kill(ROLLOUT)),
    ]
    said: list[str] = []
    baselines = Baselines(tmp_path, said.append)
    told = await play_round(strikes, SMALL, tmp_path / "round", baselines, said.append)
    assert told.struck == 2, said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["first/0", "first/1"])
async def test_seeds_that_found_a_breach(tmp_path: Path, seed: str) -> None:
    said: list[str] = []
    drawn = draw_round(seed)
    await play_round(drawn.strikes, drawn.size, tmp_path / "round", Baselines(tmp_path, said.append), said.append)
