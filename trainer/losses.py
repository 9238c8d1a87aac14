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


def compute_policy_loss(
    train: TrainSection, batch: MicroBatch, logprobs_N: Tensor, old_logprobs_N: Tensor
) -> PolicyLoss:
    """The share of a micro-batch in the loss of its update.

    `old_logprobs_N` are the trainer's own from before the update, or the sampler's, as `train.old_logprobs` says; only
    in the first case is there anything left for the importance weights to correct.
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
        loss_N, clipped_N = compute_clipped(ratio_N, advantages_N, train.clip_low, train.clip_high)
    importance_N = torch.ones_like(old_N)
    if train.old_logprobs == "trainer" and train.importance_cap > 0:
        importance_N = compute_importance_weights(old_N, batch.sampler_logprobs_N, train.importance_cap)
    loss = (batch.token_weights_N * importance_N * loss_N).sum()
    return PolicyLoss(loss, clipped_N, importance_N)


def compute_clipped(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and where the bound was active.

    Source: PPO (Schulman et al. 2017, arXiv:1707.06347), equation 7; separate bounds: DAPO (arXiv:2503.14476), eq. 10.
    """
    surrogate_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    return -torch.minimum(surrogate_N, bounded_N), bounded_N.detach() < surrogate_N.detach()


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
