"""The numbers of one step.

Means are over sampled tokens unless a name says otherwise. The gap is what lies between engine and trainer for the same
tokens: different arithmetic, and weight versions if the batch is stale.

Shape suffixes: N sampled tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainer.losses import PolicyLoss
from trainer.microbatches import MicroBatch, Row


class MetricSums:
    """Sums over the micro-batches of a step, in float64 on the CPU."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._gap_max = 0.0
        self._num_tokens = 0

    def add(self, micro: MicroBatch, outcome: PolicyLoss, trainer_logprobs_N: Tensor, entropy_N: Tensor) -> None:
        """Count one micro-batch.

        kl_k1 and kl_k3 estimate KL(sampler || trainer) from the sampled tokens (Schulman 2020, "Approximating KL
        Divergence"): k1 = -log r, k3 = r - 1 - log r, with r = p_trainer / p_sampler.
        """
        gap_N = (trainer_logprobs_N - micro.sampler_logprobs_N).double()
        values = {
            "clip_share": outcome.clipped_N.double(),
            "entropy": entropy_N.double(),
            "importance_weight_mean": outcome.importance_N.double(),
            "logprob_gap_mean": gap_N.abs(),
            "sampler_kl_k1": -gap_N,
            "sampler_kl_k3": torch.expm1(gap_N) - gap_N,
        }
        if outcome.reference_kl_N is not None:
            values["reference_kl"] = outcome.reference_kl_N.double()
        names = list(values)
        totals = torch.stack([values[name].sum() for name in names]).tolist()
        for name, total in zip(names, totals, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + total
        self._sums["loss"] = self._sums.get("loss", 0.0) + float(outcome.loss.detach())
        self._gap_max = max(self._gap_max, float(gap_N.abs().max()))
        self._num_tokens += micro.num_sampled_tokens

    @classmethod
    def merge(cls, parts: Sequence[MetricSums]) -> MetricSums:
        """The sums of several processes, in their order."""
        merged = cls()
        for part in parts:
            for name, total in part._sums.items():
                merged._sums[name] = merged._sums.get(name, 0.0) + total
            merged._gap_max = max(merged._gap_max, part._gap_max)
            merged._num_tokens += part._num_tokens
        return merged

    def compute(self, num_updates: int) -> dict[str, float]:
        """Means over sampled tokens; the loss is the mean over updates."""
        sums = dict(self._sums)
        loss = sums.pop("loss") / num_updates
        means = {name: total / self._num_tokens for name, total in sums.items()}
        return {"loss": loss, **means, "logprob_gap_max": self._gap_max}


def describe_rows(rows: Sequence[Row], rewards: Sequence[float]) -> dict[str, float]:
    """Rewards (per episode), advantages (per sample), and counts."""
    advantages = [row.advantage for row in rows]
    return {
        "reward_mean": math.fsum(rewards) / len(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "advantage_abs_mean": math.fsum(abs(value) for value in advantages) / len(advantages),
        "advantage_min": min(advantages),
        "advantage_max": max(advantages),
        "num_episodes": float(len(rewards)),
        "num_samples": float(len(rows)),
        "num_tokens": float(sum(row.sample.num_tokens for row in rows)),
        "num_sampled_tokens": float(sum(row.sample.num_sampled_tokens for row in rows)),
        "num_truncated_samples": float(sum(row.sample.status.value == "truncated" for row in rows)),
    }


class PhaseClock:
    """Seconds spent in each phase of a step. On a GPU, each phase waits for what it started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def compute(self) -> dict[str, float]:
        return {f"{phase}_seconds": seconds for phase, seconds in self._seconds.items()}


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_peak_memory(device: torch.device) -> float:
    """Bytes: of the device since the reset; on a CPU, of the process since it started."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
