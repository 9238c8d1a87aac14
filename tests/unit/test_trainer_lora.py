"""Adapters: what is trained, what is published, and what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from everroll.contracts.spec import LoraSpec, TrainSection
from tests.trainer_helpers import build_prepare_request, build_request, build_sample, read_weights, save_model
from trainer.errors import CheckpointError
from trainer.microbatches import Row, build_microbatch
from trainer.model import Policy, load_policy
from trainer.service import Trainer

RANK_4 = LoraSpec(rank=4, alpha=8.0)


def _train(**values: Any) -> TrainSection:
    return TrainSection(device="cpu", learning_rate=1e-2, lora=RANK_4).model_copy(update=values)


def _disturb(policy: Policy) -> None:
    """Give fresh adapters, whose product is zero, something to say."""
    torch.manual_seed(1)
    with torch.no_grad():
        for _, parameter in policy.named_parameters():
            parameter.normal_(0, 0.2)


def test_merged_weights_are_a_plain_model_that_computes_the_same(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    policy = load_policy(path, _train())
    assert all(".lora_" in name for name, _ in policy.named_parameters())
    micro = build_microbatch([Row(build_sample(np.random.default_rng(0), 20), 1.0, 1.0)], policy.packed)
    plain = load_policy(path, _train(lora=LoraSpec()))
    with torch.no_grad():
        before = plain.compute_logprobs(micro).logprobs_N
        assert torch.equal(policy.compute_logprobs(micro).logprobs_N, before)  # fresh adapters change nothing
        _disturb(policy)
        adapted = policy.compute_logprobs(micro).logprobs_N
    assert not torch.allclose(adapted, before, atol=1e-2)
    assert torch.equal(policy.compute_base_logprobs(micro), before)
    assert torch.equal(policy.compute_logprobs(micro).logprobs_N.detach(), adapted)  # they are on again, and train
    assert all(parameter.requires_grad for _, parameter in policy.named_parameters())
    (tmp_path / "merged").mkdir()
    policy.save(tmp_path / "merged")
    assert load_file(tmp_path / "merged/model.safetensors").keys() == load_file(path / "model.safetensors").keys()
    merged = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), torch.device("cpu"), TrainSection())
    assert torch.allclose(merged.compute_logprobs(micro).logprobs_N, adapted, atol=1e-5)


def test_only_named_modules_get_adapters(tmp_path: Path) -> None:
    policy = load_policy(save_model(tmp_path), _train(lora=LoraSpec(rank=2, target_modules=["q_proj", "v_proj"])))
    modules = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, _ in policy.named_parameters()}
    assert modules == {"q_proj", "v_proj"}
    with pytest.raises(CheckpointError, match="target_modules = \\['nothing'\\]"):
        load_policy(tmp_path, _train(lora=LoraSpec(rank=2, target_modules=["nothing"])))


def test_a_lost_trainer_goes_on_from_its_adapters(tmp_path: Path) -> None:
    """The same weights, bit for bit, as without the loss; the base is in the checkpoint, and is never trained."""
    for name in ("clean", "lost"):
        root = tmp_path / name
        train = _train(checkpoint_every=2, kl_coef=0.1)
        trainer = Trainer()
        trainer.prepare(build_prepare_request(root, train))
        for step in (1, 2, 3, 4):
            if name == "lost" and step in (3, 4):  # after a checkpoint; between two
                trainer.close()
                trainer = Trainer()
            result = trainer.train_step(build_request(root, step, train), lambda text: None)
        trainer.close()
        assert result.metrics["reference_kl"] > 0.0
    assert read_weights(tmp_path / "clean", 4) == read_weights(tmp_path / "lost", 4)
    assert read_weights(tmp_path / "clean", 4) != read_weights(tmp_path / "clean", 3)
    checkpoint = tmp_path / "lost/run/checkpoints/step_000004"
    base = load_file(tmp_path / "lost/model/model.safetensors")
    kept = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(base[name], kept[name]) for name in base)
    assert all(".lora_" in name for name in load_file(checkpoint / "adapters.safetensors"))
    with pytest.raises(CheckpointError, match=r"train\.lora cannot change"):
        load_policy(checkpoint, _train(lora=LoraSpec(rank=8)))


def test_the_adapters_start_from_the_runs_seed(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    first, again, other = (dict(load_policy(path, _train(), seed).named_parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
