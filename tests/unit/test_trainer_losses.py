"""Losses and gradients against loops in plain Python, for every combination of loss, normalisation and correction.

The oracle takes log-probabilities as given numbers and differentiates by hand; it shares no code with the trainer.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from everroll.contracts.spec import TrainSection
from tests.trainer_helpers import build_sample
from trainer.losses import compute_policy_loss
from trainer.microbatches import Row, build_microbatch, compute_token_weights

LENGTHS = [6, 12, 9]
ADVANTAGES = [1.3, -0.7, 0.4]
COMBINATIONS = list(
    itertools.product(
        ["clipped", "gspo", "cispo"],
        ["token", "sequence", "constant"],
        [("trainer", 2.0), ("trainer", 0), ("sampler", 2)],
        [(0.0, 0.0), (1.5, 0.0), (1.5, 0.3)],
    )
)
WITH_BOUND = [(*head, extras) for *head, extras in COMBINATIONS if head[0] != "cispo" or extras[0] == 0.0]
WITH_BOUND += [("cispo", "token", ("trainer", 2.0), (0.0, 0.3))]


@pytest.mark.parametrize(("loss", "normalization", "correction", "extras"), WITH_BOUND)
def test_loss_and_gradient_equal_the_oracle(
    loss: str, normalization: str, correction: tuple[str, float], extras: tuple[float, float]
) -> None:
    train = TrainSection.model_validate(
        {
            "loss": loss,
            "normalization": normalization,
            "normalization_tokens": 10,
            "old_logprobs": correction[0],
            "importance_cap": correction[1],
            "clip_low": 0.1,
            "clip_high": 0.28,
            "dual_clip": extras[0],
            "kl_coef": extras[1],
        }
    )
    rng = np.random.default_rng(3)
    samples = [build_sample(rng, num_tokens=length) for length in LENGTHS]
    counts = [sample.num_sampled_tokens for sample in samples]
    weights = compute_token_weights(train, counts)
    micro = build_microbatch([Row(*fields) for fields in zip(samples, ADVANTAGES, weights, strict=True)])
    sampler = [sample.sampler_logprobs[sample.loss_mask].astype(float).tolist() for sample in samples]
    trainer_old = [[value + rng.normal(0, 0.8) for value in values] for values in sampler]
    current = [[value + rng.normal(0, 0.25) for value in values] for values in trainer_old]
    current[1][0] = trainer_old[1][0] + 0.9  # beyond the dual clip, at a negative advantage
    reference = [[value + rng.normal(0, 0.5) for value in values] for values in current]
    old = trainer_old if correction[0] == "trainer" else sampler

    logprobs_N = torch.tensor(_flatten(current), dtype=torch.float64, requires_grad=True)
    reference_N = torch.tensor(_flatten(reference), dtype=torch.float64) if extras[1] else None
    old_N = torch.tensor(_flatten(old), dtype=torch.float64)
    outcome = compute_policy_loss(train, micro, logprobs_N, old_N, reference_N)
    outcome.loss.backward()  # type: ignore[no-untyped-call]

    expected_loss, expected_gradient = _oracle(train, current, old, sampler, reference)
    assert float(outcome.loss.detach()) == pytest.approx(expected_loss, rel=1e-6)
    assert logprobs_N.grad is not None
    np.testing.assert_allclose(logprobs_N.grad.numpy(), expected_gradient, rtol=2e-6, atol=1e-9)


def test_the_bounds_are_separate() -> None:
    """A gain is capped above only, a loss below only; the share of clipped tokens counts just these."""
    train = TrainSection(clip_low=0.1, clip_high=0.3, importance_cap=0)
    rng = np.random.default_rng(0)
    sample = build_sample(rng, num_tokens=5, num_prompt=1)
    micro = build_microbatch([Row(sample, 1.0, 1.0)])
    ratios = torch.tensor([1.29, 1.31, 0.85, 0.5], dtype=torch.float64)[: micro.num_sampled_tokens]
    old_N = torch.zeros_like(ratios)
    outcome = compute_policy_loss(train, micro, ratios.log(), old_N)
    assert outcome.clipped_N.tolist() == [ratio > 1.3 for ratio in ratios.tolist()]


def test_an_on_policy_ratio_is_one_and_the_gradient_is_the_plain_policy_gradient() -> None:
    train = TrainSection(importance_cap=0)
    sample = build_sample(np.random.default_rng(0))
    micro = build_microbatch([Row(sample, 2.0, 1.0 / sample.num_sampled_tokens)])
    logprobs_N = micro.sampler_logprobs_N.clone().requires_grad_()
    outcome = compute_policy_loss(train, micro, logprobs_N, logprobs_N.detach())
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    assert float(outcome.loss.detach()) == pytest.approx(-2.0)
    assert logprobs_N.grad is not None
    assert torch.allclose(logprobs_N.grad, torch.full_like(logprobs_N, -2.0 / sample.num_sampled_tokens))


def _oracle(
    train: TrainSection,
    current: list[list[float]],
    old: list[list[float]],
    sampler: list[list[float]],
    reference: list[list[float]],
) -> tuple[float, list[float]]:
    """Loss, and its derivative by each current log-probability."""
    low, high = 1 - train.clip_low, 1 + train.clip_high
    total_tokens = sum(len(values) for values in current)
    loss, gradient = 0.0, []
    for index, advantage in enumerate(ADVANTAGES):
        count = len(current[index])
        share = {
            "token": 1 / total_tokens,
            "sequence": 1 / len(current) / count,
            "constant": 1 / len(current) / train.normalization_tokens,
        }[train.normalization]
        mean_difference = sum(a - b for a, b in zip(current[index], old[index], strict=True)) / count
        factors = []
        for t in range(count):
            factor = share
            if train.old_logprobs == "trainer" and train.importance_cap > 0:
                factor *= min(math.exp(old[index][t] - sampler[index][t]), train.importance_cap)
            factors.append(factor)
        for t in range(count):
            ratio = math.exp(current[index][t] - old[index][t])
            if train.loss == "gspo":
                ratio = math.exp(mean_difference)
            bounded = min(max(ratio, low), high)
            r = math.exp(reference[index][t] - current[index][t])
            loss += share * train.kl_coef * (r - 1 - math.log(r))
            kl_slope = share * train.kl_coef * (1 - r)
            if train.loss == "cispo":
                loss -= factors[t] * bounded * advantage * current[index][t]
                gradient.append(-factors[t] * bounded * advantage + kl_slope)
                continue
            if 0 < train.dual_clip < ratio and advantage < 0:
                loss -= factors[t] * train.dual_clip * advantage
                gradient.append(kl_slope)
                continue
            loss -= factors[t] * min(ratio * advantage, bounded * advantage)
            inside = ratio * advantage <= bounded * advantage
            if train.loss == "clipped":
                gradient.append((-factors[t] * ratio * advantage if inside else 0.0) + kl_slope)
            else:  # each token moves the sample's one ratio by ratio / count, at every token of the sample
                gradient.append((-sum(factors) * ratio * advantage / count if inside else 0.0) + kl_slope)
    return loss, gradient


def _flatten(values: list[list[float]]) -> list[Any]:
    return [value for row in values for value in row]
