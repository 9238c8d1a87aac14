"""A trainer killed with SIGKILL at any point goes on to the same weights, bit for bit, as one that was left alone."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everroll.contracts.spec import TrainSection
from tests.trainer_driver import Command
from tests.trainer_helpers import read_weights

KILLED = -signal.SIGKILL
# Small micro-batches, so that there is something between the first and the last; every 2nd step has a checkpoint.
TRAIN = TrainSection(
    learning_rate=1e-2, warmup_steps=2, device="cpu", tokens_per_microbatch=40, checkpoint_every=2, num_minibatches=2
)


class Driver:
    """The process of `tests.trainer_driver`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_driver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def train(self, root: Path, last: int, train: TrainSection = TRAIN, **kill: Any) -> int:
        """Train up to step `last`, in a new process; returns its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = Command(root=root, last=last, train=train, **kill)
        self.process.stdin.write(command.model_dump_json() + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    assert driver.process.stdin is not None
    driver.process.stdin.close()
    driver.process.wait(timeout=60)
    assert driver.process.stdout is not None
    driver.process.stdout.close()


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory, driver: Driver) -> Path:
    """A run of three steps, from which all others go on."""
    root = tmp_path_factory.mktemp("three") / "root"
    assert driver.train(root, last=3) == 0
    return root


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, three_steps: Path, driver: Driver) -> Path:
    """The run that was left alone: 5 steps."""
    root = shutil.copytree(three_steps, tmp_path_factory.mktemp("clean") / "root")
    assert driver.train(root, last=5) == 0
    return root


KILL_POINTS: dict[str, dict[str, Any]] = {
    "request not yet stored": {"kill_event": "os.rename", "kill_path": "requests/.step_000004"},
    "between micro-batches": {"kill_progress": "step 4 update 2/2 micro-batch 2/"},
    "after the optimizer step": {"kill_progress": "step 4 writing weights"},
    "weights half written": {"kill_event": "open", "kill_path": "weights/.tmp-step_000004"},
    "weights not yet renamed": {"kill_event": "os.rename", "kill_path": "weights/step_000004"},
    "checkpoint begun": {"kill_event": "os.mkdir", "kill_path": "checkpoints/.tmp-step_000004"},
    "checkpoint without manifest": {"kill_event": "open", "kill_path": "checkpoints/.tmp-step_000004"},
    "checkpoint not yet renamed": {"kill_event": "os.rename", "kill_path": "checkpoints/step_000004"},
    "applied but not recorded": {"kill_event": "open", "kill_path": "metrics.jsonl"},
    "record not yet renamed": {"kill_event": "os.rename", "kill_path": "steps/.step_000004"},
    "old weights being removed": {"kill_event": "os.rename", "kill_path": "weights/step_000001"},
}


@pytest.mark.parametrize("point", KILL_POINTS)
def test_killed_once_equals_the_clean_run(
    driver: Driver, three_steps: Path, clean: Path, tmp_path: Path, point: str
) -> None:
    root = shutil.copytree(three_steps, tmp_path / "root")
    assert driver.train(root, last=5, **KILL_POINTS[point]) == KILLED
    assert driver.train(root, last=5) == 0

    assert read_weights(root, 4) == read_weights(clean, 4)
    assert read_weights(root, 5) == read_weights(clean, 5)
    for kind in ("checkpoints", "weights"):
        assert not list((root / "run" / kind).glob(".tmp-*"))
    steps = [json.loads(line)["step"] for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    assert read_optimizer(root) == read_optimizer(clean)


def test_killed_ten_times_equals_the_clean_run(driver: Driver, tmp_path: Path) -> None:
    """12 steps with a checkpoint at every 4th, killed at ten random moments: each start gets a little further."""
    train = TRAIN.model_copy(update={"checkpoint_every": 4})
    root, clean = tmp_path / "root", tmp_path / "clean"
    assert driver.train(clean, last=12, train=train) == 0

    rng = random.Random(5)
    for _ in range(10):
        assert driver.train(root, last=12, train=train, kill_after=rng.randint(1, 200)) == KILLED
    assert driver.train(root, last=12, train=train) == 0
    assert read_weights(root, 12) == read_weights(clean, 12)
    assert read_optimizer(root, 12) == read_optimizer(clean, 12)


def read_optimizer(root: Path, step: int = 4) -> bytes:
    return (root / "run" / "checkpoints" / f"step_{step:06d}" / "optimizer.safetensors").read_bytes()
