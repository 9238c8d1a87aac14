"""Log-probabilities and entropies of the sampled tokens, without a float32 [tokens, vocabulary] array in memory.

Hidden states go through the output layer in chunks. When there is more than one, a chunk's logits are thrown away and
computed again in the backward pass, so that memory does not grow with tokens x vocabulary.

Shape suffixes: N sampled tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_ELEMENTS = 1 << 25
"""Most logits in one chunk: 128 MiB in float32."""


@dataclass(frozen=True)
class TokenLogprobs:
    """What the current policy says of the sampled tokens, at the temperature each was drawn at."""

    logprobs_N: Tensor  # float32, with gradient
    entropy_N: Tensor  # float32, in nats, without gradient


def compute_token_logprobs(
    head: Callable[[Tensor], Tensor], states_ND: Tensor, target_ids_N: Tensor, temperatures_N: Tensor, vocab_size: int
) -> TokenLogprobs:
    """`head` turns the states of some positions into their logits."""
    size = max(1, MAX_CHUNK_ELEMENTS // vocab_size)
    chunks = zip(*(torch.split(array, size) for array in (states_ND, target_ids_N, temperatures_N)), strict=True)
    if states_ND.shape[0] <= size or not torch.is_grad_enabled():
        parts = [_compute_chunk(head, *chunk) for chunk in chunks]
    else:
        parts = [checkpoint(_compute_chunk, head, *chunk, use_reentrant=False) for chunk in chunks]
    return TokenLogprobs(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def _compute_chunk(
    head: Callable[[Tensor], Tensor], states_CD: Tensor, target_ids_C: Tensor, temperatures_C: Tensor
) -> tuple[Tensor, Tensor]:
    logits_CV = head(states_CD)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperatures_C[:, None]
    logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
    with torch.no_grad():
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).nan_to_num(nan=0.0).sum(-1)
    return logprobs_CV.gather(-1, target_ids_C[:, None])[:, 0], entropy_C
