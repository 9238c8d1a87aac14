"""Policy losses over the sampled tokens of a micro-batch, as pure functions.

All names follow one convention: `logprobs` are the current policy's and carry gradient, `old_logprobs` are constants,
`sampler_logprobs` are what the engine recorded. An update's loss is the sum over its tokens of weight x token loss.

Shape suffixes: N sampled tokens of the micro-batch, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everroll.contracts.spec import TrainSection
from trainer.microbatches import MicroBatch


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of a micro-batch, and what is worth knowing about it."""

    loss: Tensor  # scalar, with gradient
    clipped_N: Tensor  # bool: the bound was active, so the token's own ratio had no say
    importance_N: Tensor  # float32, the truncated weights
    reference_kl_N: Tensor | None = None  # float32, without gradient; None without a reference


def compute_policy_loss(
    train: TrainSection,
    batch: MicroBatch,
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    reference_logprobs_N: Tensor | None = None,
) -> PolicyLoss:
    """The share of a micro-batch in the loss of its update.

    `old_logprobs_N` are the trainer's own from before the update, or the sampler's, as `train.old_logprobs` says; only
    in the first case is there anything left for the importance weights to correct. `reference_logprobs_N` are wanted
    if `train.kl_coef` is above 0; the divergence is not importance-weighted.
    """
    old_N = old_logprobs_N.detach()
    advantages_N = batch.advantages_N
    if train.loss == "gspo":
        ratio_N = compute_sequence_ratios(logprobs_N, old_N, batch.sample_N, batch.num_samples)
    else:
        ratio_N = torch.exp(logprobs_N - old_N)
    if train.loss == "cispo":
        loss_N, clipped_N = compute_cispo(logprobs_N, ratio_N, advantages_N, train.clip_low, train.clip_high)
    else:
        loss_N, clipped_N = compute_clipped(ratio_N, advantages_N, train.clip_low, train.clip_high, train.dual_clip)
    importance_N = torch.ones_like(old_N)
    if train.old_logprobs == "trainer" and train.importance_cap > 0:
        importance_N = compute_importance_weights(old_N, batch.sampler_logprobs_N, train.importance_cap)
    loss_N = importance_N * loss_N
    kl_N = None
    if reference_logprobs_N is not None:
        kl_N = compute_reference_kl(logprobs_N, reference_logprobs_N)
        loss_N = loss_N + train.kl_coef * kl_N
    loss = (batch.token_weights_N * loss_N).sum()
    return PolicyLoss(loss, clipped_N, importance_N, None if kl_N is None else kl_N.detach())


def compute_clipped(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and where a bound was active.

    With a dual clip c > 0 and A < 0, the ratio is first bounded by c: a token that the policy has come to like much
    better since it was sampled, and should not have, then has no gradient in place of an unbounded one.

    Source: PPO (Schulman et al. 2017, arXiv:1707.06347), equation 7; separate bounds: DAPO (Yu et al. 2025,
    arXiv:2503.14476), section 3.1; dual clip: Ye et al. 2020 (arXiv:1912.09729), "Dual-clip PPO".
    """
    surrogate_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    loss_N, clipped_N = -torch.minimum(surrogate_N, bounded_N), bounded_N.detach() < surrogate_N.detach()
    if dual_clip > 0:
        beyond_N = (advantages_N < 0) & (ratio_N.detach() > dual_clip)
        loss_N, clipped_N = torch.where(beyond_N, -dual_clip * advantages_N, loss_N), clipped_N | beyond_N
    return loss_N, clipped_N


def compute_cispo(
    logprobs_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-constant(clip(ratio, 1 - clip_low, 1 + clip_high)) A log p: every token keeps its gradient, at a bounded weight.

    Source: MiniMax-M1 (2025, arXiv:2506.13585), equation 4.
    """
    ratio_N = ratio_N.detach()
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -bounded_N * advantages_N * logprobs_N, bounded_N != ratio_N


def compute_sequence_ratios(logprobs_N: Tensor, old_logprobs_N: Tensor, sample_N: Tensor, num_samples: int) -> Tensor:
    """exp of the mean of (logprobs - old_logprobs) over a sample's tokens, given back per token.

    Source: GSPO (Zheng et al. 2025, arXiv:2507.18071), equation 7.
    """
    sums_S = logprobs_N.new_zeros(num_samples).index_add(0, sample_N, logprobs_N - old_logprobs_N)
    counts_S = logprobs_N.new_zeros(num_samples).index_add(0, sample_N, torch.ones_like(old_logprobs_N))
    return torch.exp(sums_S / counts_S.clamp_min(1.0))[sample_N]


def compute_importance_weights(trainer_logprobs_N: Tensor, sampler_logprobs_N: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_sampler, cap), without gradient: truncated importance sampling.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; truncation:
    Ionides 2008, "Truncated Importance Sampling".
    """
    return torch.exp(trainer_logprobs_N.detach() - sampler_logprobs_N).clamp_max(cap)


def compute_reference_kl(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """k3 = r - 1 - log r with r = p_reference / p, carrying gradient: never negative, 0 where the two agree.

    Source: GRPO (Shao et al. 2024, arXiv:2402.03300), equation 4; the estimator: Schulman 2020, "Approximating KL
    Divergence".
    """
    log_ratio_N = reference_logprobs_N.detach() - logprobs_N
    return torch.expm1(log_ratio_N) - log_ratio_N
