"""Steps that a trainer takes again after a lost one, where something goes wrong between a step and its comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer_helpers import build_prepare_request, build_request
from tests.unit.test_audit_steps import audit, build_train, edit, take_steps
from trainer import service
from trainer.durable import hash_weights
from trainer.errors import ReplayDifferenceError
from trainer.service import Trainer


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The `at`-th time that weights are hashed there is no room for them."""
    calls = []

    def hash_or_fail(directory: Path, write: Callable[[Path], None]) -> dict[str, str]:
        calls.append(directory)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        return hash_weights(directory, write)

    monkeypatch.setattr(service, "hash_weights", hash_or_fail)


@pytest.mark.parametrize("at", [1, 2])
def test_the_disk_is_full_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The next attempt begins with the checkpoint again: what its step is applied to is known, and on record."""
    train = build_train(checkpoint_every=10)
    take_steps(tmp_path, train, 1, 2)
    trainer = Trainer()
    trainer.prepare(build_prepare_request(tmp_path, train))
    fill_the_disk(monkeypatch, at)
    with pytest.raises(OSError, match="No space left"):
        trainer.train_step(build_request(tmp_path, 3, train), lambda text: None)
    trainer.train_step(build_request(tmp_path, 3, train), lambda text: None)
    trainer.close()
    assert [str(breach) for breach in audit(tmp_path, train).breaches] == []


def test_a_difference_fails_the_step_however_often_it_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = build_train(checkpoint_every=10, on_replay_difference="fail")
    take_steps(tmp_path, train, 1, 1)
    other = build_train(learning_rate=5e-2).model_dump(mode="json")
    edit(tmp_path / "run" / "requests" / "step_000001.json", train=other)
    trainer = Trainer()
    trainer.prepare(build_prepare_request(tmp_path, train))
    fill_the_disk(monkeypatch, at=1)
    with pytest.raises(OSError, match="No space left"):
        trainer.train_step(build_request(tmp_path, 2, train), lambda text: None)
    for _ in range(2):
        with pytest.raises(ReplayDifferenceError):
            trainer.train_step(build_request(tmp_path, 2, train), lambda text: None)
    trainer.close()
