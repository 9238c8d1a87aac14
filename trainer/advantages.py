"""Group-relative advantages: pure functions from the rewards of one group to one advantage per episode.

Every sample, and every sampled token, of an episode gets its episode's advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

STD_EPSILON = 1e-6

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]


def compute_grpo(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6), with the sample standard deviation (n - 1).

    Source: DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), section 4.1.2, outcome supervision.
    """
    centred = compute_dr_grpo(rewards)
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1))
    return [value / (std + STD_EPSILON) for value in centred]


def compute_dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r - mean: without the division that favours groups that are nearly all right or nearly all wrong.

    Source: Understanding R1-Zero-Like Training (Liu et al. 2025, arXiv:2503.20783), section 3.2.
    """
    _check_group(rewards)
    if min(rewards) == max(rewards):  # exact zeros, where the mean's rounding would leave noise
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def compute_rloo(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the other episodes' rewards, which equals n / (n - 1) times (r - mean).

    Source: Back to Basics (Ahmadian et al. 2024, arXiv:2402.14740), equation 7.
    """
    scale = len(rewards) / max(len(rewards) - 1, 1)
    return [scale * value for value in compute_dr_grpo(rewards)]


_KINDS: dict[AdvantageKind, Callable[[Sequence[float]], list[float]]] = {
    "grpo": compute_grpo,
    "dr_grpo": compute_dr_grpo,
    "rloo": compute_rloo,
}


def compute_advantages(kind: AdvantageKind, rewards: Sequence[float]) -> list[float]:
    """Advantages of one group, in the order of its rewards. Equal rewards give zeros.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    return _KINDS[kind](rewards)


def _check_group(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise ValueError(f"an advantage needs at least two rewards, this group has {len(rewards)}")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward {index} of the group is {reward}")
