"""What is trained again after a lost trainer is compared with what was trained the first time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everroll.contracts.spec import TrainSection
from everroll.contracts.training import TrainResult
from tests.trainer_helpers import build_prepare_request, build_request, read_weights
from trainer.errors import ReplayDifferenceError
from trainer.service import Trainer


def _train(root: Path, train: TrainSection, first: int, last: int) -> TrainResult:
    """In a trainer that knows nothing of earlier steps but what is on disk."""
    trainer = Trainer()
    trainer.prepare(build_prepare_request(root, train))
    try:
        for step in range(first, last + 1):
            result = trainer.train_step(build_request(root, step, train), lambda text: None)
    finally:
        trainer.close()
    return result


def _build_train(on_difference: str) -> TrainSection:
    values = {"device": "cpu", "learning_rate": 1e-2, "checkpoint_every": 4, "on_replay_difference": on_difference}
    return TrainSection.model_validate(values)


def _change_record(root: Path, step: int) -> None:
    """As if other weights had been published, which is what a GPU's arithmetic can lead to."""
    path = root / "run" / "steps" / f"step_{step:06d}.json"
    record = json.loads(path.read_text())
    record["weights_sha256"] = {"model.safetensors": "0" * 64}
    path.write_text(json.dumps(record))


def test_the_same_weights_are_no_news(tmp_path: Path) -> None:
    _train(tmp_path, _build_train("fail"), 1, 2)
    result = _train(tmp_path, _build_train("fail"), 3, 3)
    assert "num_replay_differences" not in result.metrics
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_other_weights_are_said_in_log_and_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _train(tmp_path, _build_train("warn"), 1, 2)
    _change_record(tmp_path, 1)
    result = _train(tmp_path, _build_train("warn"), 3, 3)
    assert result.metrics["num_replay_differences"] == 1
    assert "step 1 trained again gave weights" in caplog.text
    assert "ERROR" in caplog.text


def test_other_weights_fail_the_step_if_wanted(tmp_path: Path) -> None:
    """The weights that are out stay as they are, and the step is not applied."""
    _train(tmp_path, _build_train("fail"), 1, 2)
    weights = read_weights(tmp_path, 2)
    _change_record(tmp_path, 2)
    with pytest.raises(ReplayDifferenceError, match="step 2 trained again gave weights"):
        _train(tmp_path, _build_train("fail"), 3, 3)
    assert not (tmp_path / "run" / "steps" / "step_000003.json").exists()
    assert read_weights(tmp_path, 2) == weights
