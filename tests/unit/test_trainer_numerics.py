"""Numbers at the edges: clipping and epsilon, nothing to learn from, huge rewards, many small passes, cut samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everroll.contracts.outcomes import TrainingError
from everroll.contracts.spec import TrainSection
from everroll.store import LocalStore
from everroll.tokens.samples import MalformedSamplesError, SampleSet, encode_samples
from tests.trainer_helpers import VOCAB_SIZE, build_model, build_request, build_sample, store_episode, store_group
from trainer.advantages import AdvantageKind, compute_advantages
from trainer.batch import load_batch
from trainer.checkpoint import LoadedState
from trainer.errors import TrainingDataError
from trainer.model import Policy
from trainer.optimizer import build_optimizer
from trainer.step import apply_step

MIXED = [[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]]


class Run:
    """A policy in memory, and steps over batches of given rewards."""

    def __init__(self, root: Path, **train: Any) -> None:
        self.root = root
        self.train = TrainSection(device="cpu").model_copy(update=train)
        self.policy = Policy(build_model(), torch.device("cpu"), self.train)
        self.state = LoadedState(self.policy, build_optimizer(self.policy, self.train), version=0)
        self.state.reference = None

    def step(self, rewards: list[list[float]], number: int = 1, lengths: tuple[int, int] = (8, 20)) -> dict[str, float]:
        rng = np.random.default_rng(0)
        store = LocalStore(self.root / "store")
        items = []
        for group, values in enumerate(rewards):
            outcomes = [
                store_episode(store, group, member, reward, [build_sample(rng, int(rng.integers(*lengths)))])
                for member, reward in enumerate(values)
            ]
            items.append(store_group(store, group, outcomes))
        request = build_request(self.root, number, self.train, items)
        return apply_step(self.state, load_batch(request, VOCAB_SIZE), request, lambda text: None)

    def read(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for _, parameter in self.policy.named_parameters()]).clone()


def test_the_gradient_is_clipped_to_its_global_norm_or_not_at_all(tmp_path: Path) -> None:
    """With an epsilon far above the gradient, AdamW's first update is the gradient times learning rate / epsilon."""
    moves, norms = {}, {}
    for limit in (0.0, 0.01, 1e9):
        run = Run(tmp_path, learning_rate=1e3, eps=1e3, max_grad_norm=limit)
        before = run.read()
        norms[limit] = run.step(MIXED)["grad_norm"]
        moves[limit] = run.read() - before
    assert norms[0.0] == norms[0.01] == norms[1e9] > 0.1  # measured before clipping
    assert torch.equal(moves[0.0], moves[1e9])
    assert float(moves[0.0].norm()) == pytest.approx(norms[0.0], rel=1e-2)
    assert float(moves[0.01].norm()) == pytest.approx(0.01, rel=1e-2)
    assert torch.nn.functional.cosine_similarity(moves[0.0], moves[0.01], dim=0) > 0.999


def test_loss_norm_and_weights_do_not_depend_on_the_number_of_passes(tmp_path: Path) -> None:
    """12 samples in two passes, one of those without an advantage; or each alone and longer than the budget."""
    rewards = [[float(member % 3) for member in range(6)] for _ in range(2)]
    results = []
    for budget in (1, 100_000):
        run = Run(tmp_path, learning_rate=1e-3, tokens_per_microbatch=budget)
        metrics = run.step(rewards, lengths=(30, 60))
        assert metrics["num_microbatches"] == (12 if budget == 1 else 2)
        results.append((metrics, run.read()))
    for name in ("loss", "grad_norm", "entropy", "logprob_gap_mean", "importance_weight_mean"):
        assert results[0][0][name] == pytest.approx(results[1][0][name], rel=1e-5, abs=1e-7), name
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


def test_gradients_of_bfloat16_passes_are_summed_in_float32(tmp_path: Path) -> None:
    """Sums over many passes in bfloat16 would lose what is below 1/256 of the sum."""
    rewards = [[float(member % 2) for member in range(8)] for _ in range(2)]
    norms = []
    for budget in (1, 100_000):
        run = Run(tmp_path, dtype="bfloat16", tokens_per_microbatch=budget)
        norms.append(run.step(rewards)["grad_norm"])
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for _, p in run.policy.named_parameters())
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


def test_a_step_without_advantages_goes_on_with_the_momentum(tmp_path: Path) -> None:
    """As AdamW does after a zero gradient; the momentum decays by beta1."""
    run = Run(tmp_path, learning_rate=1e-3, betas=(0.9, 0.95))
    run.step(MIXED)
    before = run.read()
    moments = [
        run.state.optimizer.state[parameter]["exp_avg"].clone() for _, parameter in run.policy.named_parameters()
    ]
    assert run.step([[1.0, 1.0]], number=2)["grad_norm"] == 0.0
    assert not torch.equal(run.read(), before)
    for (_, parameter), moment in zip(run.policy.named_parameters(), moments, strict=True):
        assert torch.allclose(run.state.optimizer.state[parameter]["exp_avg"], 0.9 * moment)


def test_equal_rewards_still_feel_the_reference(tmp_path: Path) -> None:
    """Without advantages the KL term alone has a gradient, once the policy has left its reference."""
    run = Run(tmp_path, learning_rate=1e-2, kl_coef=0.5)
    build_model().save_pretrained(tmp_path / "model")
    run.step(MIXED)
    metrics = run.step([[1.0, 1.0], [0.0, 0.0]], number=2)
    assert metrics["advantage_abs_mean"] == 0.0
    assert metrics["reference_kl"] > 0.0
    assert metrics["grad_norm"] > 0.0


def test_settings_of_the_optimizer_hold_from_their_step(tmp_path: Path) -> None:
    run = Run(tmp_path, learning_rate=1e-3)
    run.step(MIXED)
    changed = {"learning_rate": 2e-3, "eps": 1e-5, "betas": (0.8, 0.9), "weight_decay": 0.3}
    run.train = run.train.model_copy(update=changed)
    run.step(MIXED, number=2)
    group = run.state.optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["betas"], group["weight_decay"]) == (2e-3, 1e-5, (0.8, 0.9), 0.3)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_advantages_of_tiny_and_huge_rewards_are_finite(kind: AdvantageKind, scale: float) -> None:
    values = compute_advantages(kind, [0.0, scale, scale])
    assert all(math.isfinite(value) for value in values)
    if kind == "grpo" and scale > 1:
        assert values == pytest.approx([-1.1547, 0.57735, 0.57735], rel=1e-4)


def test_huge_rewards_are_trained_or_refused_by_name(tmp_path: Path) -> None:
    """With a standard deviation they are as good as any; without, the gradient overflows, which is said."""
    run = Run(tmp_path, learning_rate=1e-3)
    before = run.read()
    assert run.step([[0.0, 1e30, 1e30]])["grad_norm"] < 100
    assert run.read().isfinite().all()
    assert not torch.equal(run.read(), before)
    run = Run(tmp_path / "overflow", advantage="dr_grpo")
    with pytest.raises(TrainingError, match=r"the gradient's norm is (nan|inf); nothing was applied"):
        run.step([[0.0, 1e37]])
    with pytest.raises(TrainingDataError, match=r"group 0 member 1 attempt 0: reward 1e\+300 is beyond"):
        run.step([[0.0, 1e300]])


def test_a_sample_without_a_sampled_token_is_refused() -> None:
    """It would have no share in any mean."""
    sample = build_sample(np.random.default_rng(0))
    masked = type(sample)(**{**vars(sample), "loss_mask": np.zeros_like(sample.loss_mask)})
    with pytest.raises(MalformedSamplesError, match="no sampled token"):
        encode_samples(SampleSet("session", (masked,)))
