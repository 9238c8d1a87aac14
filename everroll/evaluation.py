"""The numbers of an evaluation, from the outcomes of its episodes: means and pass@k with 95 % intervals. Pure.

Prompts are the independent units, episodes of one prompt are not: every number is a mean of one value per prompt, and
its interval comes from the spread of those values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everroll.contracts.evaluation import Estimate, EvaluationRecord
from everroll.contracts.names import DEFAULT_EVALUATION
from everroll.contracts.rollout import EpisodeOutcome

_Z = 1.959963984540054
"""Of the normal distribution, for 95 %."""


def compute_pass_at_k(num_episodes: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k episodes passes, estimated without bias from n >= k of them.

    1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, eq. 1.
    """
    if not 0 <= num_passed <= num_episodes or not 1 <= k <= num_episodes:
        raise ValueError(f"pass@{k} of {num_passed} of {num_episodes} episodes")
    return 1.0 - math.comb(num_episodes - num_passed, k) / math.comb(num_episodes, k)


def compute_wilson_interval(num_passed: float, num: int) -> tuple[float, float]:
    """Of a share, at 95 %: Wilson, "Probable Inference", JASA 22 (1927). Sound also near 0 and 1 and for few trials."""
    share, z2 = num_passed / num, _Z * _Z
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = _Z / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    return max(0.0, centre - half), min(1.0, centre + half)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Mean of one value per prompt. The interval is mean +- 1.96 standard errors over prompts (Miller, "Adding Error
    Bars to Evals", arXiv:2411.00640, 2.2); of a single prompt, nothing is known but its value.
    """
    num = len(values)
    mean = math.fsum(values) / num
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1) if num > 1 else 0.0
    half = _Z * math.sqrt(variance / num)
    return Estimate(value=mean, low=mean - half, high=mean + half, num_prompts=num)


def estimate_rate(values: Sequence[float]) -> Estimate:
    """As `estimate_mean`, of values in [0, 1]: Wilson's interval where all are 0 or 1, else the normal one, cut off."""
    estimate = estimate_mean(values)
    if all(value in (0.0, 1.0) for value in values):
        low, high = compute_wilson_interval(math.fsum(values), len(values))
    else:
        low, high = max(0.0, estimate.low), min(1.0, estimate.high)
    return estimate.model_copy(update={"low": low, "high": high})


def list_ks(episodes_per_prompt: int) -> list[int]:
    """Powers of two up to the number of episodes, and that number."""
    powers = [2**power for power in range(episodes_per_prompt.bit_length())]
    return sorted({*powers, episodes_per_prompt})


def summarize_outcomes(record: EvaluationRecord, outcomes: Sequence[EpisodeOutcome]) -> EvaluationRecord:
    """The record with its numbers. Episodes without a verdict count in none of them.

    pass@k is over the prompts that have k verdicts; its `num_prompts` tells how many those are.
    """
    verdicts = [outcome for outcome in outcomes if outcome.is_trainable]
    rewards = _group_rewards(verdicts)
    samples = [outcome.samples for outcome in verdicts if outcome.samples is not None]
    exact = [ref for ref in samples if ref.min_weight_version == ref.max_weight_version == record.version]
    return record.model_copy(
        update={
            "num_episodes": len(verdicts),
            "mean_reward": estimate_mean([math.fsum(own) / len(own) for own in rewards]) if rewards else None,
            "pass_at": _estimate_passes(rewards, record),
            "min_weight_version": min((ref.min_weight_version for ref in samples), default=None),
            "max_weight_version": max((ref.max_weight_version for ref in samples), default=None),
            "num_exact_episodes": len(exact),
            "mean_sampled_tokens": sum(ref.num_sampled_tokens for ref in samples) / max(1, len(samples)),
            "agent_metrics": _mean_metrics(verdicts),
        }
    )


def name_numbers(name: str) -> str:
    """Where a set's numbers stand among a run's metrics: `eval` where there is one set, else `eval/<set>`."""
    return "eval" if name == DEFAULT_EVALUATION else f"eval/{name}"


def list_numbers(record: EvaluationRecord) -> dict[str, float]:
    """A record as metrics, for curves over weight versions; what the agents reported has `agent_` before its name."""
    numbers = {
        "num_episodes": float(record.num_episodes),
        "num_lost": float(sum(record.lost.values())),
        "mean_sampled_tokens": record.mean_sampled_tokens,
    }
    estimates = {"reward_mean": record.mean_reward, **{f"pass_at_{k}": found for k, found in record.pass_at.items()}}
    for name, estimate in estimates.items():
        if estimate is not None:
            numbers |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    agent = {f"agent_{name.replace('/', '_')}": value for name, value in record.agent_metrics.items()}
    return {**numbers, **agent}


def _group_rewards(verdicts: Sequence[EpisodeOutcome]) -> list[list[float]]:
    """Rewards by prompt."""
    rewards: dict[int, list[float]] = {}
    for outcome in verdicts:
        if outcome.reward is not None:
            rewards.setdefault(outcome.key.group, []).append(outcome.reward)
    return [rewards[prompt] for prompt in sorted(rewards)]


def _estimate_passes(rewards: Sequence[Sequence[float]], record: EvaluationRecord) -> dict[str, Estimate]:
    estimates = {}
    for k in list_ks(record.episodes_per_prompt):
        values = [
            compute_pass_at_k(len(own), sum(reward >= record.pass_reward for reward in own), k)
            for own in rewards
            if len(own) >= k
        ]
        if values:
            estimates[str(k)] = estimate_rate(values)
    return estimates


def _mean_metrics(verdicts: Sequence[EpisodeOutcome]) -> dict[str, float]:
    """Mean of what agents reported, over the episodes that did."""
    values: dict[str, list[float]] = {}
    for outcome in verdicts:
        for name, value in outcome.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in sorted(values.items())}
