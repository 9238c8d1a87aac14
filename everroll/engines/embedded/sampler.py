"""Draws one token per row, reproducibly, and reports its log-probability.

The log-probability is that of log_softmax(logits / temperature), taken in float32: the distribution before top-p and
top-k cut it, as SGLang reports it and as the trainer's forward pass gives it. It is not renormalised to what top-p and
top-k leave. Temperature 0 takes the likeliest token and reports its log-probability at temperature 1.

The draw for token i of a sequence inverts the cumulative distribution at a number that depends on (seed, i) alone, so
it does not matter what else is in the batch, or when a request joined it.

Shapes: N rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from everroll.engines.embedded.sequence import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SEED_MASK = 2**64 - 1
# 48 bits: small enough that number * total < total always holds in float64.
_DRAW_SHIFT = np.uint64(16)
_DRAW_SCALE = 2.0**-48


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's draw needs."""

    params: SamplingParams
    index: int
    """i: how many tokens this sequence has sampled before."""


def sample(logits_NV: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
    """Token ids and log-probabilities, one per row."""
    device = logits_NV.device
    temperatures = [draw.params.temperature or 1.0 for draw in draws]
    logits_NV = logits_NV.float()
    if any(temperature != 1.0 for temperature in temperatures):
        logits_NV = logits_NV / torch.tensor(temperatures, device=device)[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = _keep_allowed(logprobs_NV.exp(), draws).cumsum(dim=-1, dtype=torch.float64)
    numbers_N1 = torch.from_numpy(compute_uniforms(draws)).to(device)[:, None]
    tokens_N1 = torch.searchsorted(cdf_NV, numbers_N1 * cdf_NV[:, -1:], right=True).clamp_(max=logits_NV.shape[1] - 1)
    greedy = [row for row, draw in enumerate(draws) if draw.params.temperature == 0]
    if greedy:
        rows = torch.tensor(greedy, device=device)
        tokens_N1[rows] = logprobs_NV[rows].argmax(dim=-1, keepdim=True)
    sampled_N = logprobs_NV.gather(1, tokens_N1)[:, 0]
    return tokens_N1[:, 0].tolist(), sampled_N.tolist()


def compute_uniforms(draws: list[Draw]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A number in [0, 1) per row from (seed, index): splitmix64, twice."""
    seeds = np.array([draw.params.seed & _SEED_MASK for draw in draws], dtype=np.uint64)
    indexes = np.array([draw.index for draw in draws], dtype=np.uint64)
    bits = _mix(_mix(seeds + _GOLDEN) + (indexes + np.uint64(1)) * _GOLDEN)
    return (bits >> _DRAW_SHIFT).astype(np.float64) * _DRAW_SCALE


def _mix(bits: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


def _keep_allowed(probs_NV: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Zero what top-k and top-p forbid. Top-p keeps the fewest likeliest tokens that together reach it."""
    rows = [
        row
        for row, draw in enumerate(draws)
        if draw.params.temperature != 0 and (draw.params.top_p < 1 or draw.params.top_k > 0)
    ]
    if not rows:
        return probs_NV
    device, vocab = probs_NV.device, probs_NV.shape[1]
    top_ks = [draws[row].params.top_k if draws[row].params.top_k > 0 else vocab for row in rows]
    top_p_N1 = torch.tensor([draws[row].params.top_p for row in rows], device=device)[:, None]
    top_k_N1 = torch.tensor(top_ks, device=device)[:, None]
    rows_N = torch.tensor(rows, device=device)
    sorted_NV, order_NV = probs_NV[rows_N].sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
    forbidden_NV = (before_NV >= top_p_N1) | (torch.arange(vocab, device=device) >= top_k_N1)
    forbidden_NV[:, 0] = False
    kept_NV = torch.zeros_like(sorted_NV).scatter_(1, order_NV, sorted_NV.masked_fill(forbidden_NV, 0.0))
    probs_NV[rows_N] = kept_NV
    return probs_NV
