"""Master weights are float32 whatever is computed in and whatever is published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from everroll.audit.account import Account
from everroll.audit.report import Findings
from everroll.audit.sources import read_run_files
from everroll.audit.steps import check_steps
from everroll.contracts.spec import TrainSection
from everroll.store import LocalStore
from tests.trainer_helpers import build_model, build_prepare_request, build_request, save_model, store_random_batch
from trainer.rundir import RunDirectory
from trainer.service import Trainer

BATCH = 1


def _run(root: Path, train: TrainSection, steps: int, lose_at: int | None = None) -> list[dict[str, float]]:
    """Train on the same batch at every step; the trainer is replaced before step `lose_at`."""
    trainer = Trainer()
    trainer.prepare(build_prepare_request(root, train))
    batch = store_random_batch(LocalStore(root / "store"), BATCH, num_groups=2, num_members=4)
    metrics = []
    for step in range(1, steps + 1):
        if step == lose_at:
            trainer.close()
            trainer = Trainer()
        metrics.append(trainer.train_step(build_request(root, step, train, batch), lambda text: None).metrics)
    trainer.close()
    return metrics


def _read(root: Path, kind: str, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(root / "run" / kind / f"step_{step:06d}" / "model.safetensors")
    return tensors


def _train(**values: Any) -> TrainSection:
    # With the sampler's log-probabilities as the old ones, the loss of one batch falls as it is trained on.
    return TrainSection.model_validate(
        {"device": "cpu", "learning_rate": 3e-3, "old_logprobs": "sampler", "clip_high": 50, "clip_low": 1, **values}
    )


def test_bfloat16_training_moves_float32_masters_and_the_loss_falls(tmp_path: Path) -> None:
    train = _train(dtype="bfloat16", publish_dtype="bfloat16", checkpoint_every=2)
    metrics = _run(tmp_path / "clean", train, steps=8)
    losses = [values["loss"] for values in metrics]
    assert losses[-1] < losses[0] - 0.1
    masters, published = _read(tmp_path / "clean", "checkpoints", 8), _read(tmp_path / "clean", "weights", 8)
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert masters.keys() == published.keys()
    assert all(torch.equal(masters[name].bfloat16(), published[name]) for name in masters)
    assert any(not torch.equal(masters[name], published[name].float()) for name in masters)
    _run(tmp_path / "lost", train, steps=8, lose_at=6)
    again = _read(tmp_path / "lost", "checkpoints", 8)
    assert all(torch.equal(again[name], masters[name]) for name in masters)


@pytest.mark.parametrize(("model_dtype", "wanted"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
def test_published_weights_have_the_starting_models_type(
    tmp_path: Path, model_dtype: torch.dtype, wanted: torch.dtype
) -> None:
    """Also after the trainer was lost and knows its own checkpoint only."""
    save_model(tmp_path / "model", build_model().to(model_dtype))
    _run(tmp_path, _train(publish_dtype="model"), steps=3, lose_at=2)
    assert {tensor.dtype for tensor in _read(tmp_path, "weights", 3).values()} == {wanted}
    assert {tensor.dtype for tensor in _read(tmp_path, "checkpoints", 3).values()} == {torch.float32}
    config = json.loads((tmp_path / "run/weights/step_000003/config.json").read_text())
    assert config["dtype"] == str(wanted).removeprefix("torch.")


def test_the_starting_models_type_is_kept_whatever_was_published_before(tmp_path: Path) -> None:
    """Checkpoints of a run that published float32 name that; the type of the model is not forgotten for it."""
    save_model(tmp_path / "model", build_model().to(torch.bfloat16))
    _run(tmp_path, _train(checkpoint_every=2), steps=2)
    train, trainer = _train(publish_dtype="model"), Trainer()
    trainer.prepare(build_prepare_request(tmp_path, train))
    trainer.train_step(build_request(tmp_path, 3, train), lambda text: None)
    trainer.close()
    assert {tensor.dtype for tensor in _read(tmp_path, "weights", 3).values()} == {torch.bfloat16}


@pytest.mark.parametrize(("first", "later"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_weights_that_are_written_again_are_those_on_record(tmp_path: Path, first: str, later: str) -> None:
    """Of a fork at a step whose weights were let go of: it publishes in another type from the next step on."""
    _run(tmp_path, _train(publish_dtype=first), steps=1)
    weights = tmp_path / "run" / "weights" / "step_000001"
    before = (weights / "model.safetensors").read_bytes()
    shutil.rmtree(weights)
    trainer, train = Trainer(), _train(publish_dtype=later)
    trainer.prepare(build_prepare_request(tmp_path, train))
    assert (weights / "model.safetensors").read_bytes() == before
    trainer.train_step(build_request(tmp_path, 2, train), lambda text: None)
    trainer.close()
    assert {str(tensor.dtype) for tensor in _read(tmp_path, "weights", 2).values()} == {f"torch.{later}"}
    assert [str(breach) for breach in audit_fork(tmp_path, train, step=1).breaches] == []


def audit_fork(root: Path, train: TrainSection, step: int) -> Findings:
    """Of a run whose history begins after `step`."""
    account, run = Account(by_record=step), RunDirectory(root / "run")
    for number in range(step + 1, run.latest_applied() + 1):
        record = run.read_record(number)
        assert record is not None
        account.requests[number], account.applied[number] = build_request(root, number, train), record.result
    findings = Findings()
    check_steps(account, read_run_files(root / "run"), train, findings)
    return findings


def test_the_reference_is_where_the_run_started(tmp_path: Path) -> None:
    """No divergence at first; a strong term then keeps it smaller."""
    free, held = (
        _run(tmp_path / str(coef), _train(kl_coef=coef, learning_rate=1e-2, max_grad_norm=0), steps=6)
        for coef in (1e-6, 10.0)
    )
    assert free[0]["reference_kl"] == held[0]["reference_kl"] == 0.0
    assert 0.0 < held[-1]["reference_kl"] < 0.5 * free[-1]["reference_kl"]
    assert held[-1]["reference_seconds"] > 0.0


def test_another_reference_can_be_named(tmp_path: Path) -> None:
    reference = save_model(tmp_path / "reference", build_model(seed=5))
    metrics = _run(tmp_path, _train(kl_coef=0.1, kl_reference=str(reference)), steps=1)
    assert metrics[0]["reference_kl"] > 0.001
