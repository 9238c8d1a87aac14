"""Samples end to end in one row: which families allow it, and that each then gives what it gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from everroll.contracts.spec import TrainSection
from tests.trainer_helpers import build_model, build_sample
from trainer.errors import CheckpointError
from trainer.microbatches import Row, build_microbatch
from trainer.model import Policy

CPU = torch.device("cpu")
_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def _gemma2() -> Any:
    """Every other layer sees a window only."""
    return Gemma2ForCausalLM(Gemma2Config(**_SIZES, head_dim=8, sliding_window=4))


def _mistral() -> Any:
    """All layers see a window only."""
    return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=4))


def _mamba() -> Any:
    """No attention: its state would flow from sample to sample."""
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("build", [build_model, _llama, _gpt2])
def test_packed_and_padded_agree(build: Any, checkpointing: bool) -> None:
    """Values and gradients, in float64."""
    torch.manual_seed(0)
    model = build().double()
    rng = np.random.default_rng(0)
    rows = [Row(build_sample(rng, num_tokens=n), 1.0, 1.0) for n in (15, 9, 11)]
    results = []
    for layout in ("off", "on"):
        values = {"device": "cpu", "padding_free": layout, "gradient_checkpointing": checkpointing}
        policy = Policy(model, CPU, TrainSection.model_validate(values))
        model.zero_grad()
        got = policy.compute_logprobs(build_microbatch(rows, policy.packed))
        got.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((policy.packed, got.logprobs_N.detach(), gradient))
    (_, padded, padded_gradient), (packed, together, gradient) = results
    assert packed
    assert torch.allclose(padded, together, rtol=1e-9, atol=1e-12)
    assert torch.allclose(padded_gradient, gradient, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    ("build", "why"), [(_gemma2, "other kinds than full attention"), (_mistral, "window|other kinds"), (_mamba, "")]
)
def test_a_model_that_cannot_be_packed_is_padded_or_refused(build: Any, why: str) -> None:
    torch.manual_seed(0)
    model = build()
    before = model.config._attn_implementation
    policy = Policy(model, CPU, TrainSection(device="cpu"))
    assert not policy.packed
    assert model.config._attn_implementation == before
    with pytest.raises(CheckpointError, match=f"does not allow it: .*({why})"):
        Policy(build(), CPU, TrainSection(device="cpu", padding_free="on"))
