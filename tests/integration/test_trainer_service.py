"""The trainer as a worker uses it: exactly once, in order, the same weights after a lost process, and it learns."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.spec import TrainSection
from everroll.contracts.training import GroupBatchItem, TrainResult
from everroll.store import LocalStore
from everroll.tokens.samples import NOT_SAMPLED_VERSION, Sample
from tests.trainer_helpers import (
    VOCAB_SIZE,
    build_model,
    build_prepare_request,
    build_request,
    read_weights,
    save_model,
    store_episode,
    store_group,
    store_random_batch,
)
from trainer.__main__ import main
from trainer.durable import check_directory
from trainer.errors import CheckpointError, RunInUseError, StepOrderError, TrainingDataError
from trainer.service import Trainer


def _ignore(text: str) -> None:
    """No one follows the progress."""


def _start(root: Path, train: TrainSection | None = None) -> Trainer:
    trainer = Trainer(take_over_seconds=0.2)
    trainer.prepare(build_prepare_request(root, train))
    return trainer


def _train(trainer: Trainer, root: Path, first: int, last: int, train: TrainSection | None = None) -> list[TrainResult]:
    return [trainer.train_step(build_request(root, step, train), _ignore) for step in range(first, last + 1)]


def test_prepare_makes_version_0_from_the_users_model_once(tmp_path: Path) -> None:
    trainer = Trainer()
    request = build_prepare_request(tmp_path)
    weights = trainer.prepare(request)
    assert weights.version == 0
    model = AutoModelForCausalLM.from_pretrained(weights.path)
    user = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), user.parameters(), strict=True))
    assert (Path(weights.path) / "tokenizer_config.json").read_text() == '{"tokenizer_class": "None"}'
    written = (Path(weights.path) / "model.safetensors").stat().st_mtime_ns
    assert trainer.prepare(request) == weights
    trainer.close()
    assert Trainer().prepare(request) == weights
    assert (Path(weights.path) / "model.safetensors").stat().st_mtime_ns == written


def test_a_step_makes_new_weights_that_load(tmp_path: Path) -> None:
    result = _train(_start(tmp_path), tmp_path, 1, 1)[0]
    assert (result.step, result.weights.version, result.applied) == (1, 1, True)
    check_directory(Path(result.weights.path))
    check_directory(tmp_path / "run" / "checkpoints" / "step_000001")
    model = AutoModelForCausalLM.from_pretrained(result.weights.path)
    assert not torch.equal(model.model.embed_tokens.weight, build_model().model.embed_tokens.weight)
    assert result.metrics["num_sampled_tokens"] > 0
    assert result.metrics["learning_rate"] == 1e-2


def test_a_retried_step_is_applied_once(tmp_path: Path) -> None:
    """C10: in the same process, in a new one, and it goes on as if nothing had happened."""
    trainer = _start(tmp_path)
    first, second = _train(trainer, tmp_path, 1, 2)
    weights = read_weights(tmp_path, 2)
    again = trainer.train_step(build_request(tmp_path, 2), _ignore)
    assert again == second.model_copy(update={"applied": False})
    trainer.close()
    trainer = _start(tmp_path)
    assert trainer.train_step(build_request(tmp_path, 1), _ignore) == first.model_copy(update={"applied": False})
    assert trainer.train_step(build_request(tmp_path, 2), _ignore).applied is False
    assert read_weights(tmp_path, 2) == weights
    _train(trainer, tmp_path, 3, 3)
    clean = tmp_path / "clean"
    _train(_start(clean), clean, 1, 3)
    assert read_weights(tmp_path, 3) == read_weights(clean, 3)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_stored_batches_are_trained_again_since_the_last_checkpoint(tmp_path: Path) -> None:
    """A lost trainer with sparse checkpoints: equal weights, and nothing but the run directory and the store needed."""
    train = TrainSection(learning_rate=1e-2, warmup_steps=3, device="cpu", checkpoint_every=4)
    trainer = _start(tmp_path, train)
    _train(trainer, tmp_path, 1, 3, train)
    trainer.close()
    assert not (tmp_path / "run" / "checkpoints" / "step_000003").exists()
    progress: list[str] = []
    trainer = Trainer()
    trainer.train_step(build_request(tmp_path, 4, train), progress.append)
    assert progress[0] == "loading checkpoint 0"
    clean = tmp_path / "clean"
    _train(_start(clean, train), clean, 1, 4, train)
    assert read_weights(tmp_path, 4) == read_weights(clean, 4)


def test_a_step_that_was_interrupted_is_not_applied(tmp_path: Path) -> None:
    """Cancellation raises out of the progress callback, also when parameters were half updated."""
    trainer = _start(tmp_path)

    def interrupt(text: str) -> None:
        if "writing weights" in text:
            raise InterruptedError(text)

    with pytest.raises(InterruptedError):
        trainer.train_step(build_request(tmp_path, 1), interrupt)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert _train(trainer, tmp_path, 1, 1)[0].applied
    clean = tmp_path / "clean"
    _train(_start(clean), clean, 1, 1)
    assert read_weights(tmp_path, 1) == read_weights(clean, 1)


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    trainer = _start(tmp_path)
    with pytest.raises(StepOrderError, match="step 3 needs weight version 2, but the newest applied step is 0"):
        trainer.train_step(build_request(tmp_path, 3), _ignore)
    _train(trainer, tmp_path, 1, 1)
    other = store_random_batch(LocalStore(tmp_path / "store"), 1, num_members=4)
    with pytest.raises(StepOrderError, match="step 1 was applied with another batch"):
        trainer.train_step(build_request(tmp_path, 1, batch=other), _ignore)


def test_a_refused_batch_changes_nothing(tmp_path: Path) -> None:
    """The right batch for the same step is taken afterwards."""
    trainer = _start(tmp_path)
    with pytest.raises(TrainingDataError, match="the batch is empty"):
        trainer.train_step(build_request(tmp_path, 1, batch=[]), _ignore)
    assert list((tmp_path / "run" / "requests").iterdir()) == []
    assert _train(trainer, tmp_path, 1, 1)[0].applied


def test_a_torn_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    """C8: a flipped bit in the newest; the one before and the stored batch give the same weights."""
    trainer = _start(tmp_path)
    _train(trainer, tmp_path, 1, 3)
    trainer.close()
    torn = tmp_path / "run" / "checkpoints" / "step_000003" / "optimizer.safetensors"
    body = bytearray(torn.read_bytes())
    body[-1] ^= 1
    torn.unlink()
    torn.write_bytes(body)
    progress: list[str] = []
    Trainer().train_step(build_request(tmp_path, 4), progress.append)
    assert progress[0] == "loading checkpoint 2"
    clean = tmp_path / "clean"
    _train(_start(clean), clean, 1, 4)
    assert read_weights(tmp_path, 4) == read_weights(clean, 4)


def test_lost_weights_are_written_again(tmp_path: Path) -> None:
    """Asked for a step whose weights were removed by hand, before engines could load them."""
    trainer = _start(tmp_path)
    _train(trainer, tmp_path, 1, 2)
    weights = read_weights(tmp_path, 2)
    (tmp_path / "run" / "weights" / "step_000002" / "model.safetensors").unlink()
    result = trainer.train_step(build_request(tmp_path, 2), _ignore)
    assert not result.applied
    assert read_weights(tmp_path, 2) == weights


def test_no_complete_checkpoint_is_an_error(tmp_path: Path) -> None:
    trainer = _start(tmp_path)
    _train(trainer, tmp_path, 1, 1)
    trainer.close()
    for path in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint up to step 1"):
        Trainer().train_step(build_request(tmp_path, 2), _ignore)


def test_one_process_trains_a_run(tmp_path: Path) -> None:
    _start(tmp_path)
    with pytest.raises(RunInUseError):
        Trainer(take_over_seconds=0.1).train_step(build_request(tmp_path, 1), _ignore)


def test_a_late_retry_waits_for_the_step_in_progress(tmp_path: Path) -> None:
    """An activity that was given up on still runs in its thread when its retry arrives in the same process."""
    trainer = _start(tmp_path)
    request = build_request(tmp_path, 1)
    begun, go_on = threading.Event(), threading.Event()
    results: dict[str, TrainResult] = {}

    def hold(text: str) -> None:
        begun.set()
        assert go_on.wait(timeout=100)

    def train(name: str, on_progress: Callable[[str], None]) -> None:
        results[name] = trainer.train_step(request, on_progress)

    late = threading.Thread(target=train, args=("late", hold))
    late.start()
    assert begun.wait(timeout=100)
    retry = threading.Thread(target=train, args=("retry", _ignore))
    retry.start()
    go_on.set()
    late.join(timeout=100)
    retry.join(timeout=100)
    assert {name: result.applied for name, result in results.items()} == {"late": True, "retry": False}
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_old_checkpoints_and_weights_are_removed(tmp_path: Path) -> None:
    train = TrainSection(device="cpu", learning_rate=1e-3, keep_checkpoints=2)
    _train(_start(tmp_path, train), tmp_path, 1, 5, train)
    names = {
        kind: sorted(path.name for path in (tmp_path / "run" / kind).iterdir()) for kind in ("checkpoints", "weights")
    }
    assert names["checkpoints"] == ["step_000004", "step_000005"]
    assert names["weights"] == ["step_000003", "step_000004", "step_000005"]


def test_the_result_does_not_depend_on_the_micro_batching(tmp_path: Path) -> None:
    tensors = []
    for tokens in (1, 60, 10_000):
        root = tmp_path / str(tokens)
        train = TrainSection(device="cpu", learning_rate=1e-3, tokens_per_microbatch=tokens)
        result = _train(_start(root, train), root, 1, 1, train)[0]
        tensors.append(AutoModelForCausalLM.from_pretrained(result.weights.path).model.embed_tokens.weight)
    assert torch.allclose(tensors[0], tensors[1], atol=1e-5)
    assert torch.allclose(tensors[0], tensors[2], atol=1e-5)


def test_the_gap_is_zero_where_the_sampler_is_the_trainer(tmp_path: Path) -> None:
    """D8: tokens drawn at 0.7 from these very weights, with their log-probabilities at 0.7."""
    model = build_model()
    save_model(tmp_path / "model", model)
    batch = _store_sampled_batch(tmp_path, model, 0, 0.7, lambda token: float(token < VOCAB_SIZE // 2))
    metrics = _start(tmp_path).train_step(build_request(tmp_path, 1, batch=batch), _ignore).metrics
    assert metrics["logprob_gap_max"] < 1e-5
    assert metrics["sampler_kl_k3"] < 1e-9
    assert metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo"])
def test_rewarded_tokens_become_likelier(tmp_path: Path, loss: str) -> None:
    """A bandit: one token is drawn after a fixed prompt, and pays if it is below 16 of 64."""
    train = TrainSection.model_validate({"device": "cpu", "learning_rate": 3e-2, "loss": loss})
    model = build_model()
    save_model(tmp_path / "model", model)
    trainer = _start(tmp_path, train)
    rewards = []
    for step in range(1, 9):
        batch = _store_sampled_batch(tmp_path, model, step - 1, 1.0, lambda token: float(token < 16))
        result = trainer.train_step(build_request(tmp_path, step, train, batch), _ignore)
        rewards.append(result.metrics["reward_mean"])
        model = AutoModelForCausalLM.from_pretrained(result.weights.path)
    assert sum(rewards[:2]) / 2 < 0.5
    assert sum(rewards[-2:]) / 2 > 0.8


def _store_sampled_batch(
    root: Path, model: torch.nn.Module, version: int, temperature: float, pay: object
) -> list[GroupBatchItem]:
    """Two groups of 16 episodes, each one token drawn from the model."""
    assert callable(pay)
    prompt = [3, 1, 4]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
    rng = torch.Generator().manual_seed(version)
    items = []
    for group in (2 * version, 2 * version + 1):
        outcomes = []
        for member in range(16):
            token = int(torch.multinomial(logprobs.exp(), 1, generator=rng))
            sample = Sample(
                token_ids=np.array([*prompt, token], dtype=np.int32),
                loss_mask=np.array([False, False, False, True]),
                sampler_logprobs=np.array([0, 0, 0, float(logprobs[token])], dtype=np.float32),
                weight_versions=np.array([NOT_SAMPLED_VERSION] * 3 + [version], dtype=np.int32),
                status=SampleStatus.COMPLETED,
                finish_reason="length",
                temperature=temperature,
                num_turns=1,
            )
            outcomes.append(store_episode(LocalStore(root / "store"), group, member, pay(token), [sample]))
        items.append(store_group(LocalStore(root / "store"), group, outcomes))
    return items


def test_one_stored_batch_can_be_trained_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m trainer`: the same weights as in a worker; a second call looks the step up; errors have exit codes."""
    save_model(tmp_path / "model")
    path = tmp_path / "request.json"
    path.write_text(build_request(tmp_path, 1).model_dump_json())
    command = [sys.executable, "-m", "trainer", str(path), "--threads", "1"]
    first = json.loads(subprocess.run(command, capture_output=True, timeout=100, check=True).stdout)
    assert (first["step"], first["applied"]) == (1, True)
    clean = tmp_path / "clean"
    _train(_start(clean), clean, 1, 1)
    assert read_weights(tmp_path, 1) == read_weights(clean, 1)

    assert main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == {**first, "applied": False}
    path.write_text(build_request(tmp_path, 5).model_dump_json())
    assert main([str(path)]) == 1
    assert "StepOrderError: " in capsys.readouterr().err
    path.write_text("{}")
    assert main([str(path)]) == 2
    assert "Field required" in capsys.readouterr().err
