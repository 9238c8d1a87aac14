"""Micro-batches: every sampled token once, and a gradient that does not depend on the split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everroll.contracts.spec import TrainSection
from tests.trainer_helpers import build_model, build_request, build_sample
from trainer.batch import TrainingEpisode, TrainingGroup, load_batch
from trainer.losses import compute_policy_loss
from trainer.microbatches import Row, build_microbatch, build_rows, compute_token_weights, split_rows
from trainer.model import Policy


@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(1, 100))
@settings(max_examples=50, deadline=None)
def test_a_split_keeps_every_row_and_the_budget(lengths: list[int], budget: int) -> None:
    rng = np.random.default_rng(0)
    rows = [Row(build_sample(rng, num_tokens=length, num_prompt=1), 0.0, 1.0) for length in lengths]
    parts = split_rows(rows, budget)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    for part in parts:
        padded = max(row.sample.num_tokens for row in part) * len(part)
        assert padded <= budget or len(part) == 1


@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(1, 100))
@settings(max_examples=50, deadline=None)
def test_a_packed_split_keeps_every_row_and_the_budget(lengths: list[int], budget: int) -> None:
    rng = np.random.default_rng(0)
    rows = [Row(build_sample(rng, num_tokens=length, num_prompt=1), 0.0, 1.0) for length in lengths]
    parts = split_rows(rows, budget, packed=True)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    for part in parts:
        assert sum(row.sample.num_tokens for row in part) <= budget or len(part) == 1
        assert build_microbatch(part, packed=True).input_ids_BT.numel() == sum(
            row.sample.num_tokens - 1 for row in part
        )


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_speak_of_the_same_tokens(packed: bool) -> None:
    """Position p of the flattened inputs predicts the token that follows it."""
    rng = np.random.default_rng(1)
    rows = [Row(build_sample(rng, num_tokens=length, temperature=0.7), 1.5, 0.1) for length in (9, 14)]
    micro = build_microbatch(rows, packed)
    starts = [0, 8] if packed else [0, micro.input_ids_BT.shape[1]]
    at = 0
    for index, row in enumerate(rows):
        for t in np.flatnonzero(row.sample.loss_mask):
            assert micro.positions_N[at] == starts[index] + t - 1
            assert micro.input_ids_BT.flatten()[micro.positions_N[at]] == row.sample.token_ids[t - 1]
            assert micro.target_ids_N[at] == row.sample.token_ids[t]
            assert micro.sampler_logprobs_N[at] == row.sample.sampler_logprobs[t]
            assert micro.sample_N[at] == index
            at += 1
    assert at == micro.num_sampled_tokens
    assert torch.allclose(micro.temperatures_N, torch.tensor(0.7))


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_token_weights_sum_to_one(normalization: str) -> None:
    train = TrainSection.model_validate({"normalization": normalization})
    counts = [3, 7, 1]
    weights = compute_token_weights(train, counts)
    assert sum(weight * count for weight, count in zip(weights, counts, strict=True)) == pytest.approx(1.0)


def test_all_samples_of_an_episode_get_its_advantage() -> None:
    rng = np.random.default_rng(2)
    episodes = (
        TrainingEpisode("first", 1.0, (build_sample(rng), build_sample(rng))),
        TrainingEpisode("second", 0.0, (build_sample(rng),)),
    )
    rows = build_rows([TrainingGroup(0, episodes)], TrainSection(advantage="dr_grpo"))
    assert [row.advantage for row in rows] == [0.5, 0.5, -0.5]


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo"])
@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_the_split(tmp_path: Path, loss: str, normalization: str) -> None:
    """In float64: all samples in one pass, one by one, and something between; padded and end to end."""
    values = {"loss": loss, "normalization": normalization, "device": "cpu", "kl_coef": 0.1}
    train = TrainSection.model_validate(values)
    request = build_request(tmp_path, 1, train)
    rows = build_rows(load_batch(request, 64).groups, train)
    gradients = [
        _compute_gradient(rows, train, budget, layout) for layout in ("off", "on") for budget in (1, 50, 10_000)
    ]
    assert len({budget for budget, _ in gradients}) >= 3  # three different splits
    for _, gradient in gradients[1:]:
        assert torch.allclose(gradient, gradients[0][1], rtol=1e-9, atol=1e-13)
    assert float(gradients[0][1].abs().max()) > 1e-4


def _compute_gradient(rows: list[Row], train: TrainSection, budget: int, layout: str) -> tuple[int, torch.Tensor]:
    policy = Policy(build_model().double(), torch.device("cpu"), train.model_copy(update={"padding_free": layout}))
    assert policy.packed == (layout == "on")
    parts = split_rows(rows, budget, policy.packed)
    for part in parts:
        micro = build_microbatch(part, policy.packed)
        logprobs_N = policy.compute_logprobs(micro).logprobs_N
        old_N = logprobs_N.detach() + 0.4 * torch.sin(7 * micro.sampler_logprobs_N)  # a ratio of its own per token
        reference_N = logprobs_N.detach() + 0.3 * torch.cos(5 * micro.sampler_logprobs_N)
        compute_policy_loss(train, micro, logprobs_N, old_N, reference_N).loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad.flatten() for _, parameter in policy.named_parameters() if parameter.grad is not None]
    return len(parts), torch.cat(gradients)
