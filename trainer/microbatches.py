"""From training groups to the tensors of one forward and backward pass.

An optimizer update is a weighted sum over sampled tokens, whose weights are fixed for the whole update before it is
split. So every sampled token counts once, and its share does not depend on the split.

Shape suffixes: B samples, T positions (the longest sample less its last token), N sampled tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everroll.contracts.spec import TrainSection
from everroll.tokens.samples import Sample
from trainer.advantages import compute_advantages
from trainer.batch import TrainingGroup

PADDING_TOKEN_ID = 0


@dataclass(frozen=True)
class Row:
    """One sample as the loss needs it."""

    sample: Sample
    advantage: float
    token_weight: float
    """Share of each of its sampled tokens in the update's loss."""


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded inputs, and flat arrays over the sampled tokens in row-major order.

    Attention is causal, so padding on the right needs no mask: no real token can see it, and nothing is read from it.
    """

    input_ids_BT: Tensor  # int64
    positions_N: Tensor  # int64, index into the flattened [B * T] of the position that predicts the token
    target_ids_N: Tensor  # int64
    sample_N: Tensor  # int64, row of the token, 0 <= sample < B
    sampler_logprobs_N: Tensor  # float32
    temperatures_N: Tensor  # float32
    advantages_N: Tensor  # float32
    token_weights_N: Tensor  # float32

    @property
    def num_samples(self) -> int:
        return int(self.input_ids_BT.shape[0])

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.target_ids_N.shape[0])

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def build_rows(groups: Sequence[TrainingGroup], train: TrainSection) -> list[Row]:
    """All samples of one optimizer update, ordered by group, member and sample.

    Raises:
        ValueError: a group of one.
    """
    pairs = [
        (sample, advantage)
        for group in groups
        for episode, advantage in zip(group.episodes, compute_advantages(train.advantage, group.rewards), strict=True)
        for sample in episode.samples
    ]
    counts = [sample.num_sampled_tokens for sample, _ in pairs]
    weights = compute_token_weights(train, counts)
    return [Row(sample, advantage, weight) for (sample, advantage), weight in zip(pairs, weights, strict=True)]


def compute_token_weights(train: TrainSection, counts: Sequence[int]) -> list[float]:
    """Weight of each sampled token of each sample, from the samples' numbers of sampled tokens.

    token:    1 / all tokens                 DAPO (Yu et al. 2025, arXiv:2503.14476), equation 8
    sequence: 1 / (samples x own tokens)     GRPO (Shao et al. 2024, arXiv:2402.03300), equation 3
    constant: 1 / (samples x constant)       Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), section 3.2
    """
    if train.normalization == "token":
        return [1.0 / sum(counts)] * len(counts)
    if train.normalization == "sequence":
        return [1.0 / (len(counts) * count) for count in counts]
    return [1.0 / (len(counts) * train.normalization_tokens)] * len(counts)


def split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Group rows of similar length so that no part exceeds `max_tokens`, padding included.

    Longest first, so that memory peaks at once and not after minutes. A sample longer than the budget stands alone.
    """
    by_length = sorted(rows, key=lambda row: -row.sample.num_tokens)  # stable: equal lengths keep their order
    parts: list[list[Row]] = []
    for row in by_length:
        if parts and parts[-1][0].sample.num_tokens * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def build_microbatch(rows: Sequence[Row]) -> MicroBatch:
    """Pad and flatten."""
    length = max(row.sample.num_tokens for row in rows) - 1
    input_ids_BT = np.full((len(rows), length), PADDING_TOKEN_ID, dtype=np.int64)
    positions, samples = [], []
    for index, row in enumerate(rows):
        input_ids_BT[index, : row.sample.num_tokens - 1] = row.sample.token_ids[:-1]
        predicted = np.flatnonzero(row.sample.loss_mask)  # the first token is never sampled, so each is >= 1
        positions.append(index * length + predicted - 1)
        samples.append(np.full(predicted.size, index))
    sample_N = torch.from_numpy(np.concatenate(samples))

    def per_sample(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[sample_N]

    return MicroBatch(
        input_ids_BT=torch.from_numpy(input_ids_BT),
        positions_N=torch.from_numpy(np.concatenate(positions)),
        target_ids_N=torch.from_numpy(
            np.concatenate([row.sample.token_ids[row.sample.loss_mask] for row in rows]).astype(np.int64)
        ),
        sample_N=sample_N,
        sampler_logprobs_N=torch.from_numpy(
            np.concatenate([row.sample.sampler_logprobs[row.sample.loss_mask] for row in rows])
        ),
        temperatures_N=per_sample([row.sample.temperature for row in rows]),
        advantages_N=per_sample([row.advantage for row in rows]),
        token_weights_N=per_sample([row.token_weight for row in rows]),
    )
