"""C3: what a trainer goes on with belongs to the step that was applied, not to what was dispatched ahead of it."""

from __future__ import annotations

import json
from pathlib import Path

from everroll.contracts.spec import TrainSection
from everroll.contracts.training import LedgerMark, TrainRequest
from everroll.run_files import MANIFEST_NAME
from everroll.store import LocalStore
from tests.trainer_helpers import build_prepare_request, build_request, read_weights, store_random_batch
from trainer.rundir import RunDirectory
from trainer.service import Trainer

GROUPS_PER_STEP = 2
AHEAD = 6
TRAIN = TrainSection(device="cpu", learning_rate=1e-2, checkpoint_every=2, on_replay_difference="fail")


def build_marked_request(root: Path, step: int) -> TrainRequest:
    """Six groups were started beyond those of the batch when it was taken."""
    mark = LedgerMark(next_group=step * GROUPS_PER_STEP + AHEAD, dropped=[100 + step])
    return build_request(root, step, TRAIN).model_copy(update={"mark": mark})


def train(root: Path, first: int, last: int) -> list[str]:
    """In a trainer that knows nothing but what is on disk; returns what it said."""
    said: list[str] = []
    trainer = Trainer()
    trainer.prepare(build_prepare_request(root, TRAIN))
    for step in range(first, last + 1):
        trainer.train_step(build_marked_request(root, step), said.append)
    trainer.close()
    return said


def list_trained_groups(root: Path, last: int) -> list[int]:
    run = RunDirectory(root / "run")
    records = [run.read_record(step) for step in range(1, last + 1)]
    return [item.group for record in records if record is not None for item in record.batch]


def test_the_batches_since_an_older_checkpoint_are_trained_again_and_no_others(tmp_path: Path) -> None:
    """Samples of six groups ahead lie in the store; the newest checkpoint is torn, and the one before is taken."""
    root, clean = tmp_path / "lost", tmp_path / "clean"
    for step in (6, 7, 8):
        store_random_batch(LocalStore(root / "store"), step)
    train(root, 1, 5)
    (root / "run/checkpoints/step_000004" / MANIFEST_NAME).unlink()
    said = train(root, 6, 6)
    assert said[0] == "loading checkpoint 2"
    updates = [text.split(" update")[0] for text in said if "micro-batch 1/" in text]
    assert updates == ["step 3", "step 4", "step 5", "step 6"]
    assert list_trained_groups(root, 6) == list(range(6 * GROUPS_PER_STEP))
    train(clean, 1, 6)
    assert read_weights(root, 6) == read_weights(clean, 6)


def test_the_ledgers_mark_is_that_of_the_applied_step(tmp_path: Path) -> None:
    """Also when the trainer was killed between checkpoint and record, and when the step is asked for again."""
    train(tmp_path, 1, 4)
    record = tmp_path / "run/steps/step_000004.json"
    before = json.loads(record.read_text())
    record.unlink()
    train(tmp_path, 4, 4)
    assert json.loads(record.read_text()) == before
    run = RunDirectory(tmp_path / "run")
    for step in range(1, 5):
        applied = run.read_record(step)
        assert applied is not None
        assert applied.mark == LedgerMark(next_group=step * GROUPS_PER_STEP + AHEAD, dropped=[100 + step])
