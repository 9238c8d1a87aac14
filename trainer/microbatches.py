"""From training groups to the tensors of one forward and backward pass.

An optimizer update is a weighted sum over sampled tokens, whose weights are fixed for the whole update before it is
split. So every sampled token counts once, and its share does not depend on the split.

Two layouts: padded, one row per sample; or packed, all samples end to end in one row.

Shape suffixes: B rows, T positions (a sample takes one less than it has tokens: its last one predicts nothing), S
samples, N sampled tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everroll.contracts.spec import TrainSection
from everroll.tokens.samples import Sample
from trainer.advantages import compute_advantages
from trainer.batch import TrainingGroup
from trainer.packed_attention import Packing, build_packing

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
    """Inputs of one pass, and flat arrays over the sampled tokens, sample by sample.

    Padded: attention is causal, so padding on the right needs no mask: no real token can see it, and nothing is read
    from it. Packed: `packing` tells the attention where samples begin.
    """

    num_samples: int
    input_ids_BT: Tensor  # int64
    positions_N: Tensor  # int64, index into the flattened [B * T] of the position that predicts the token
    target_ids_N: Tensor  # int64
    sample_N: Tensor  # int64, sample of the token, 0 <= sample < S
    sampler_logprobs_N: Tensor  # float32
    temperatures_N: Tensor  # float32
    advantages_N: Tensor  # float32
    token_weights_N: Tensor  # float32
    packing: Packing | None = None  # None if padded

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.target_ids_N.shape[0])

    def to(self, device: torch.device) -> MicroBatch:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Packing)
        }
        return replace(self, **moved)


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


def split_rows(rows: Sequence[Row], max_tokens: int, packed: bool = False) -> list[list[Row]]:
    """Group rows of similar length so that no part exceeds `max_tokens`, padding included.

    Longest first, so that memory peaks at once and not after minutes. A sample longer than the budget stands alone.
    """
    by_length = sorted(rows, key=lambda row: -row.sample.num_tokens)  # stable: equal lengths keep their order
    parts: list[list[Row]] = []
    used = 0
    for row in by_length:
        # In a padded part every row takes as much as the first, which is the longest.
        cost = row.sample.num_tokens if packed or not parts else parts[-1][0].sample.num_tokens
        if parts and used + cost <= max_tokens:
            parts[-1].append(row)
            used += cost
        else:
            parts.append([row])
            used = row.sample.num_tokens
    return parts


def build_microbatch(rows: Sequence[Row], packed: bool = False) -> MicroBatch:
    """Lay samples out, padded or end to end, and flatten."""
    lengths = [row.sample.num_tokens - 1 for row in rows]
    padded_length = max(lengths)
    starts = np.cumsum([0, *lengths[:-1]]) if packed else np.arange(len(rows)) * padded_length
    input_ids = np.full(sum(lengths) if packed else len(rows) * padded_length, PADDING_TOKEN_ID, dtype=np.int64)
    positions, samples = [], []
    for index, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
        input_ids[start : start + length] = row.sample.token_ids[:-1]
        predicted = np.flatnonzero(row.sample.loss_mask)  # the first token is never sampled, so each is >= 1
        positions.append(start + predicted - 1)
        samples.append(np.full(predicted.size, index))
    sample_N = torch.from_numpy(np.concatenate(samples))

    def per_sample(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[sample_N]

    return MicroBatch(
        num_samples=len(rows),
        input_ids_BT=torch.from_numpy(input_ids).reshape(1 if packed else len(rows), -1),
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
        packing=build_packing(lengths) if packed else None,
    )
