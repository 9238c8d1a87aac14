"""The policy's log-probabilities against the model's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

import trainer.logprobs
from everroll.contracts.spec import TrainSection
from tests.trainer_helpers import build_model, build_sample, save_model
from trainer.errors import CheckpointError
from trainer.microbatches import MicroBatch, Row, build_microbatch
from trainer.model import Policy, load_policy

CPU = TrainSection(device="cpu")


def _microbatch(temperature: float = 1.0) -> tuple[list[Row], MicroBatch]:
    rng = np.random.default_rng(0)
    rows = [Row(build_sample(rng, num_tokens=n, temperature=temperature), 1.0, 1.0) for n in (15, 9, 11)]
    return rows, build_microbatch(rows)


def _reference(model: torch.nn.Module, rows: list[Row]) -> tuple[list[float], list[float]]:
    """One sample at a time, without padding, from the model's own logits."""
    logprobs, entropies = [], []
    for row in rows:
        ids = torch.tensor(row.sample.token_ids[None].astype(np.int64))
        with torch.no_grad():
            logits = model(ids).logits[0].double() / row.sample.temperature
        for t in np.flatnonzero(row.sample.loss_mask):
            p = torch.softmax(logits[t - 1], -1)
            logprobs.append(float(p[row.sample.token_ids[t]].log()))
            entropies.append(float(-(p * p.log()).sum()))
    return logprobs, entropies


def _build_gemma() -> Any:
    """Caps its logits."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=4, final_logit_softcapping=0.5,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def _build_granite() -> Any:
    """Scales its logits."""
    config = GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, logits_scaling=8.0,
    )  # fmt: skip
    return GraniteForCausalLM(config)


def _build_gpt2() -> Any:
    """Learned positions, and dropout on by default."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("build", [build_model, _build_gemma, _build_granite, _build_gpt2])
def test_logprobs_and_entropy_equal_the_models_own(build: Any, temperature: float) -> None:
    """D8: at the recorded temperature, whatever a family does to its logits; padding and dropout change nothing."""
    torch.manual_seed(0)
    model = build().eval()
    rows, micro = _microbatch(temperature)
    policy = Policy(model, torch.device("cpu"), CPU)
    got = policy.compute_logprobs(micro)
    logprobs, entropies = _reference(model, rows)
    np.testing.assert_allclose(got.logprobs_N.detach().numpy(), logprobs, atol=2e-5)
    np.testing.assert_allclose(got.entropy_N.numpy(), entropies, atol=2e-5)


def test_dropout_is_off_while_activations_are_recomputed() -> None:
    """Checkpointing needs training mode, in which GPT-2 would drop; the gradient stays the same."""
    torch.manual_seed(0)
    model = _build_gpt2()
    _, micro = _microbatch()
    gradients = []
    for enabled in (False, True):
        policy = Policy(model, torch.device("cpu"), TrainSection(device="cpu", gradient_checkpointing=enabled))
        model.zero_grad()
        policy.compute_logprobs(micro).logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert policy.model.training
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("build", [build_model, _build_gemma])
def test_chunks_change_neither_values_nor_gradient(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    """Computed again in the backward pass, from the hidden states or from the model's own logits."""
    torch.manual_seed(0)
    model = build().eval()
    policy = Policy(model, torch.device("cpu"), CPU)
    _, micro = _microbatch(0.9)
    results = []
    for limit in (1 << 25, 64 * 5):  # all at once; five tokens at a time
        monkeypatch.setattr(trainer.logprobs, "MAX_CHUNK_ELEMENTS", limit)
        model.zero_grad()
        got = policy.compute_logprobs(micro)
        got.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((got.logprobs_N.detach(), got.entropy_N, gradient))
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_over_float32_weights() -> None:
    model = build_model()
    rows, micro = _microbatch()
    policy = Policy(model, torch.device("cpu"), TrainSection(device="cpu", dtype="bfloat16"))
    got = policy.compute_logprobs(micro)
    got.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
    logprobs, _ = _reference(model, rows)
    difference = np.abs(got.logprobs_N.detach().numpy() - logprobs).max()
    assert 1e-6 < difference < 0.1
    assert got.logprobs_N.dtype == torch.float32
    assert all(
        p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters()
    )


def test_loaded_parameters_lie_as_fresh_ones_do(tmp_path: Path) -> None:
    """Otherwise the rounding of matrix products could differ after a reload."""
    policy = load_policy(save_model(tmp_path / "model"), CPU)
    assert all(parameter.data_ptr() % 64 == 0 for _, parameter in policy.named_parameters())


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no readable causal LM"):
        load_policy(tmp_path, CPU)
