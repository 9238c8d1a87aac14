"""Advantages against sums written out by hand."""

from __future__ import annotations

import math
import statistics

import pytest

from trainer.advantages import AdvantageKind, compute_advantages

REWARDS = [1.0, 0.0, 0.5, 0.25]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    expected = [(reward - mean) / (std + 1e-6) for reward in REWARDS]
    assert compute_advantages("grpo", REWARDS) == pytest.approx(expected, rel=1e-12)


def test_dr_grpo_only_centres() -> None:
    assert compute_advantages("dr_grpo", REWARDS) == pytest.approx([0.5625, -0.4375, 0.0625, -0.1875], rel=1e-12)


def test_rloo_leaves_one_out() -> None:
    expected = []
    for index, reward in enumerate(REWARDS):
        others = [other for position, other in enumerate(REWARDS) if position != index]
        expected.append(reward - sum(others) / len(others))
    assert compute_advantages("rloo", REWARDS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-30])
def test_equal_rewards_give_exact_zeros(kind: AdvantageKind, reward: float) -> None:
    """E3: 0.1 + 0.1 + 0.1 is not 0.3, and rounding noise over 1e-6 would be an advantage."""
    assert compute_advantages(kind, [reward] * 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_has_no_advantage(kind: AdvantageKind) -> None:
    """E4."""
    with pytest.raises(ValueError, match="at least two rewards"):
        compute_advantages(kind, [1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    """E2."""
    with pytest.raises(ValueError, match="reward 1 of the group"):
        compute_advantages("grpo", [1.0, bad, 0.0])
