"""The trainer's loss and gradient against TRL's, for the same model and samples, where TRL offers the same loss."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everroll.contracts.spec import TrainSection
from tests.trainer_helpers import build_model, build_sample
from trainer.losses import compute_importance_weights, compute_policy_loss
from trainer.microbatches import Row, build_microbatch, compute_token_weights
from trainer.model import Policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # TRL's and its imports' warnings are theirs
]

TEMPERATURE = 0.75
LOSSES: list[dict[str, Any]] = [
    {"normalization": "token", "clip_low": 0.1, "clip_high": 0.28},
    {"normalization": "sequence"},
    {"normalization": "constant", "normalization_tokens": 9},
    {"normalization": "token", "dual_clip": 1.5},
    {"normalization": "sequence", "kl_coef": 0.2},
    {"normalization": "constant", "normalization_tokens": 9, "importance_cap": 1.3},
    {"loss": "gspo", "normalization": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    {"loss": "cispo", "normalization": "token", "clip_low": 1.0, "clip_high": 0.2},
]


@pytest.mark.parametrize("values", LOSSES)
def test_loss_and_gradient_equal_trls(tmp_path: Path, values: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    from benchmarks.trl_loss import build_trl_inputs, build_trl_trainer

    train = TrainSection.model_validate({"importance_cap": 0, "device": "cpu", **values})
    rng = np.random.default_rng(0)
    samples = [
        build_sample(rng, num_tokens=n, num_prompt=p, temperature=TEMPERATURE) for n, p in ((9, 3), (14, 5), (11, 2))
    ]
    weights = compute_token_weights(train, [sample.num_sampled_tokens for sample in samples])
    rows = [Row(*fields) for fields in zip(samples, [1.25, -0.75, 0.5], weights, strict=True)]
    counts = [sample.num_sampled_tokens for sample in samples]

    policy = Policy(build_model().double(), torch.device("cpu"), train)
    micro = build_microbatch(rows, policy.packed)
    logprobs_N = policy.compute_logprobs(micro).logprobs_N
    noise = torch.Generator().manual_seed(0)
    old_N = logprobs_N.detach() + 0.4 * torch.randn(logprobs_N.shape, generator=noise)
    reference_N = logprobs_N.detach() + 0.5 * torch.randn(logprobs_N.shape, generator=noise)
    outcome = compute_policy_loss(train, micro, logprobs_N, old_N, reference_N if train.kl_coef else None)
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    importance_N = torch.ones_like(old_N)
    if train.importance_cap > 0:
        importance_N = compute_importance_weights(old_N, micro.sampler_logprobs_N, train.importance_cap)

    theirs = build_model().double()
    trl = build_trl_trainer(copy.deepcopy(theirs), train, tmp_path, TEMPERATURE)
    trl.model.eval()
    inputs = build_trl_inputs(
        rows, sum(counts), old_N.split(counts), reference_N.split(counts), importance_N.double().split(counts)
    )
    loss = trl._compute_loss(trl.model, inputs)
    loss.backward()

    assert float(outcome.loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    wanted = dict(trl.model.named_parameters())
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, wanted[name].grad, rtol=1e-5, atol=2e-7), name
