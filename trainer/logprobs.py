"""Log-probabilities and entropies of the sampled tokens, without a float32 [tokens, vocabulary] array in memory.

Hidden states go through the output layer in chunks. When there is more than one, a chunk's logits are thrown away and
computed again in the backward pass, so that memory does not grow with tokens x vocabulary. Within a chunk one array of
that size is all there is: logits become probabilities, and those the gradient, in place.

Shape suffixes: N sampled tokens, C tokens of a chunk, R tokens of a block of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_ELEMENTS = 1 << 26
"""Most logits in one chunk: 256 MiB in float32."""
_CPU_BLOCK_ELEMENTS = 1 << 20
"""Logits worked on at a time, so that they stay in the processor's cache. An accelerator takes a whole chunk."""
_LOWEST = -1e4
"""Of a logit below the row's largest: its probability is 0 in any type, and 0 x infinity would not be a number."""


@dataclass(frozen=True)
class TokenLogprobs:
    """What the current policy says of the sampled tokens, at the temperature each was drawn at."""

    logprobs_N: Tensor  # float32, with gradient
    entropy_N: Tensor  # float32, in nats, without gradient


def compute_token_logprobs(
    head: Callable[[Tensor], Tensor], states_ND: Tensor, target_ids_N: Tensor, temperatures_N: Tensor, vocab_size: int
) -> TokenLogprobs:
    """`head` turns the states of some positions into their logits, in memory of their own, which is written over."""
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
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    outcome: tuple[Tensor, Tensor] = _Logprobs.apply(logits_CV, target_ids_C, temperatures_C)  # type: ignore[no-untyped-call]
    return outcome


class _Logprobs(torch.autograd.Function):
    """log softmax(logits / temperature) at the targets, and the distribution's entropy; writes over the logits.

    With p the probabilities, the gradient of a log-probability by its row of logits is (one-hot(target) - p) /
    temperature. The backward pass writes it over p, so there can be but one.
    """

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, target_ids_C: Tensor, temperatures_C: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = logits_CV.shape
        size = max(1, _CPU_BLOCK_ELEMENTS // vocab_size) if logits_CV.device.type == "cpu" else num_rows
        blocks = zip(*(torch.split(array, size) for array in (logits_CV, target_ids_C, temperatures_C)), strict=True)
        parts = [_turn_into_probabilities(*block) for block in blocks]
        logprobs_C, entropy_C = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        ctx.save_for_backward(logits_CV, target_ids_C, temperatures_C)
        ctx.mark_non_differentiable(entropy_C)
        ctx.spent = False
        return logprobs_C, entropy_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_C: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        if ctx.spent:
            raise RuntimeError("a second backward pass through the same log-probabilities")
        ctx.spent = True
        probabilities_CV, target_ids_C, temperatures_C = ctx.saved_tensors
        scale_C1 = (gradient_C / temperatures_C)[:, None].to(probabilities_CV.dtype)
        gradient_CV = probabilities_CV.mul_(-scale_C1)
        return gradient_CV.scatter_add_(1, target_ids_C[:, None], scale_C1), None, None


def _turn_into_probabilities(logits_RV: Tensor, target_ids_R: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities at the targets and entropies; the logits become probabilities, in place.

    With x the logits less their row's largest, and Z the sum of their exponentials, a log-probability is x - log Z and
    the entropy log Z - sum(p x).
    """
    logits_RV.div_(temperatures_R[:, None])
    logits_RV.sub_(logits_RV.amax(-1, keepdim=True))
    chosen_R = logits_RV.gather(-1, target_ids_R[:, None])[:, 0]
    logits_RV.clamp_min_(_LOWEST)
    exponentials_RV = logits_RV.exp()
    sums_R = exponentials_RV.sum(-1)
    entropy_R = sums_R.log() - logits_RV.mul_(exponentials_RV).sum(-1) / sums_R
    torch.div(exponentials_RV, sums_R[:, None], out=logits_RV)
    return chosen_R - sums_R.log(), entropy_R
