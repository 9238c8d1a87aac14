"""A whole step against a plain loop: one sample at a time, the model's own logits, torch's own AdamW."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everroll.contracts.outcomes import TrainingError
from everroll.contracts.spec import TrainSection
from everroll.contracts.training import GroupBatchItem, TrainRequest
from everroll.store import LocalStore
from everroll.tokens.samples import Sample
from tests.trainer_helpers import VOCAB_SIZE, build_model, build_request, build_sample, store_episode, store_group
from trainer.batch import TrainingBatch, load_batch
from trainer.checkpoint import LoadedState
from trainer.model import Policy
from trainer.optimizer import (
    build_optimizer,
    compute_learning_rate,
    export_optimizer_state,
    import_optimizer_state,
)
from trainer.step import apply_step

MIXED = [[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.5, 0.0, 0.0]]  # the second group has no gradient


def _store(root: Path, rewards: list[list[float]]) -> list[GroupBatchItem]:
    rng = np.random.default_rng(0)
    store = LocalStore(root / "store")
    return [
        store_group(
            store,
            group,
            [
                store_episode(store, group, member, reward, [build_sample(rng, int(rng.integers(8, 20)))])
                for member, reward in enumerate(values)
            ],
        )
        for group, values in enumerate(rewards)
    ]


def _apply(root: Path, train: TrainSection, rewards: list[list[float]]) -> tuple[Any, dict[str, float], TrainingBatch]:
    """The model after one step, the metrics and the batch."""
    request = build_request(root, 1, train, _store(root, rewards))
    batch = load_batch(request, VOCAB_SIZE)
    policy = Policy(build_model(), torch.device("cpu"), train)
    state = LoadedState(policy, build_optimizer(policy, train), version=0)
    return policy.model, apply_step(state, batch, request, lambda text: None), batch


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_step_equals_the_plain_loop(tmp_path: Path, num_minibatches: int, advantage: str) -> None:
    """Later updates take their ratios against the policy before the first, corrected against the sampler."""
    train = TrainSection.model_validate(
        {
            "device": "cpu",
            "learning_rate": 3e-3,
            "weight_decay": 0.1,
            "num_minibatches": num_minibatches,
            "advantage": advantage,
            "tokens_per_microbatch": 40,
        }
    )
    model, metrics, batch = _apply(tmp_path, train, MIXED)
    expected, loss, grad_norm = _train_plainly(build_model(), batch, train)
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(got, wanted, atol=2e-5)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(grad_norm, rel=1e-3)
    assert metrics["num_sampled_tokens"] == sum(s.num_sampled_tokens for _, s in _list(batch))


def _train_plainly(model: Any, batch: TrainingBatch, train: TrainSection) -> tuple[Any, float, float]:
    old_model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=train.betas, eps=1e-8, weight_decay=0.1)
    size = len(batch.groups) // train.num_minibatches
    losses, norms = [], []
    for start in range(0, len(batch.groups), size):
        groups = batch.groups[start : start + size]
        total = sum(s.num_sampled_tokens for g in groups for e in g.episodes for s in e.samples)
        loss = torch.zeros(())
        for group in groups:
            mean = sum(group.rewards) / 3
            std = math.sqrt(sum((reward - mean) ** 2 for reward in group.rewards) / 2)
            for episode in group.episodes:
                centred = episode.reward - mean
                value = centred / (std + 1e-6) if train.advantage == "grpo" else centred * 1.5
                for sample in episode.samples:
                    loss = loss + _compute_loss(model, old_model, sample, value) / total
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, sum(losses) / len(losses), sum(norms) / len(norms)


def _compute_loss(model: Any, old_model: Any, sample: Sample, advantage: float) -> torch.Tensor:
    """Sum over sampled tokens."""
    ids = torch.tensor(sample.token_ids.astype(np.int64))
    logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)
    with torch.no_grad():
        old_logprobs = torch.log_softmax(old_model(ids[None]).logits[0], -1)
    loss = torch.zeros(())
    for t in np.flatnonzero(sample.loss_mask):
        new, old = logprobs[t - 1, ids[t]], old_logprobs[t - 1, ids[t]]
        correction = min(math.exp(float(old) - float(sample.sampler_logprobs[t])), 2.0)
        ratio = torch.exp(new - old)
        loss = loss - correction * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return loss


def _list(batch: TrainingBatch) -> list[tuple[str, Sample]]:
    return [(e.who, s) for g in batch.groups for e in g.episodes for s in e.samples]


def test_equal_rewards_move_nothing_but_are_measured(tmp_path: Path) -> None:
    """E3, with the filter off."""
    model, metrics, _ = _apply(tmp_path, TrainSection(device="cpu", learning_rate=1e-2), [[1.0, 1.0], [0.0, 0.0]])
    for got, wanted in zip(model.parameters(), build_model().parameters(), strict=True):
        assert torch.equal(got, wanted)
    assert (metrics["loss"], metrics["grad_norm"], metrics["advantage_abs_mean"]) == (0.0, 0.0, 0.0)
    assert metrics["entropy"] > 1.0
    assert metrics["logprob_gap_mean"] > 0.0


def test_a_gradient_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    train = TrainSection(device="cpu")
    request = build_request(tmp_path, 1, train, _store(tmp_path, MIXED))
    policy = Policy(build_model(), torch.device("cpu"), train)
    with torch.no_grad():
        policy.model.model.norm.weight[0] = math.nan
    state = LoadedState(policy, build_optimizer(policy, train), version=0)
    with pytest.raises(TrainingError, match="the gradient's norm is nan"):
        apply_step(state, load_batch(request, VOCAB_SIZE), request, lambda text: None)


def test_the_learning_rate_rises_linearly() -> None:
    train = TrainSection(learning_rate=0.4, warmup_steps=4)
    assert [compute_learning_rate(train, step) for step in (1, 2, 4, 9)] == pytest.approx([0.1, 0.2, 0.4, 0.4])


def test_settings_of_the_request_hold_from_its_step(tmp_path: Path) -> None:
    """A learning rate that was changed during the run."""
    train = TrainSection(device="cpu", learning_rate=1e-3)
    request = build_request(tmp_path, 1, train, _store(tmp_path, MIXED))
    policy = Policy(build_model(), torch.device("cpu"), train)
    state = LoadedState(policy, build_optimizer(policy, train), version=0)
    batch = load_batch(request, VOCAB_SIZE)
    rates = []
    for step, rate in ((1, 1e-3), (2, 5e-4)):
        changed: TrainRequest = request.model_copy(
            update={"step": step, "train": train.model_copy(update={"learning_rate": rate})}
        )
        rates.append(apply_step(state, batch, changed, lambda text: None)["learning_rate"])
    assert rates == [1e-3, 5e-4]


def test_optimizer_state_travels_by_name(tmp_path: Path) -> None:
    train = TrainSection(device="cpu", learning_rate=1e-3)
    request = build_request(tmp_path, 1, train, _store(tmp_path, MIXED))
    policy = Policy(build_model(), torch.device("cpu"), train)
    state = LoadedState(policy, build_optimizer(policy, train), version=0)
    assert export_optimizer_state(state.optimizer, policy) == {}
    apply_step(state, load_batch(request, VOCAB_SIZE), request, lambda text: None)
    tensors = export_optimizer_state(state.optimizer, policy)
    fresh = build_optimizer(policy, train)
    import_optimizer_state(fresh, policy, tensors)
    again = export_optimizer_state(fresh, policy)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    with pytest.raises(TrainingError, match="does not fit the model"):
        import_optimizer_state(fresh, policy, {"other.weight.step": torch.zeros(())})


def test_learning_rate_falls_linearly_and_stays_at_its_share() -> None:
    train = TrainSection(learning_rate=1.0, warmup_steps=2, decay_steps=4, final_lr_share=0.2)
    rates = [compute_learning_rate(train, step) for step in range(1, 9)]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    flat = TrainSection(learning_rate=1.0, decay_steps=2, final_lr_share=0.0)
    assert [compute_learning_rate(flat, step) for step in range(1, 5)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
