"""Several trainer processes: the same weights as one, checkpoints that load at another size, and lost processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file

from everroll.contracts.spec import TrainSection
from tests.trainer_helpers import build_prepare_request, build_request, read_weights, save_model
from tests.trainer_ranks_driver import Command
from trainer.__main__ import main
from trainer.service import Trainer

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Small micro-batches, so that processes have different numbers of them, and weight decay, which moves what has no
# gradient; two updates a step, so that later ones see what earlier ones did to the shards.
SETTINGS = {
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "device": "cpu",
    "tokens_per_microbatch": 40,
    "num_minibatches": 2,
    "checkpoint_every": 2,
}
PARALLEL = ["ddp", "fsdp"]


def build_train(parallel: str, **settings: object) -> TrainSection:
    return TrainSection.model_validate({**SETTINGS, "parallel": parallel, **settings})


class Pair:
    """Two processes of `tests.trainer_ranks_driver`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [*TORCHRUN, "-m", "tests.trainer_ranks_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def train(self, root: Path, first: int, last: int, train: TrainSection, bad_batch: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = Command(root=root, first=first, last=last, train=train, bad_batch=bad_batch)
        self.process.stdin.write(command.model_dump_json() + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    assert pair.process.stdin is not None
    pair.process.stdin.close()
    assert pair.process.wait(timeout=60) == 0
    assert pair.process.stdout is not None
    pair.process.stdout.close()


def train_alone(root: Path, first: int, last: int, train: TrainSection) -> dict[str, float]:
    trainer = Trainer()
    trainer.prepare(build_prepare_request(root, train))
    metrics: dict[str, float] = {}
    for step in range(first, last + 1):
        metrics = trainer.train_step(build_request(root, step, train), lambda text: None).metrics
    trainer.close()
    return metrics


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Four steps of one process."""
    root = tmp_path_factory.mktemp("alone")
    return root, train_alone(root, 1, 4, build_train("ddp"))


def assert_equal_weights(got: Path, wanted: Path, step: int = 4) -> None:
    """Within rounding: sums over tokens are taken in another order."""
    tensors = [load_file(root / "run" / "weights" / f"step_{step:06d}" / "model.safetensors") for root in (got, wanted)]
    start = load_file(wanted / "model" / "model.safetensors")
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[1].items():
        assert torch.linalg.norm(tensors[0][name] - tensor) <= 1e-6 * torch.linalg.norm(tensor), name
        assert torch.linalg.norm(tensor - start[name]) > 1e-4 * torch.linalg.norm(tensor), f"{name} was not trained"


@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_make_the_weights_of_one(
    pair: Pair, alone: tuple[Path, dict[str, float]], tmp_path: Path, parallel: str
) -> None:
    answer = pair.train(tmp_path, 1, 4, build_train(parallel))
    assert_equal_weights(tmp_path, alone[0])
    assert answer["metrics"]["num_processes"] == 2
    for name in ("loss", "grad_norm", "entropy", "clip_share", "logprob_gap_mean", "num_tokens", "reward_mean"):
        assert answer["metrics"][name] == pytest.approx(alone[1][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_checkpoint_loads_in_more_and_in_fewer_processes(
    pair: Pair, alone: tuple[Path, dict[str, float]], tmp_path: Path, parallel: str
) -> None:
    """The optimizer's state too: without its momentum, step 3 would come out differently."""
    train = build_train(parallel)
    fewer, more = tmp_path / "fewer", tmp_path / "more"
    pair.train(fewer, 1, 2, train)
    train_alone(more, 1, 2, train)
    pair.train(more, 3, 4, train)  # takes the processes to another run, so that `fewer` is free
    train_alone(fewer, 3, 4, train)
    assert_equal_weights(fewer, alone[0])
    assert_equal_weights(more, alone[0])
    shards = list((fewer / "run" / "checkpoints" / "step_000002").glob("*.distcp"))
    assert len(shards) == (2 if parallel == "fsdp" else 0)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_stored_batches_trained_again_give_the_same_bits(pair: Pair, tmp_path: Path, parallel: str) -> None:
    """Lost at step 3 with a checkpoint at step 2; with as many processes as before."""
    train = build_train(parallel, on_replay_difference="fail")
    lost, other, clean = tmp_path / "lost", tmp_path / "other", tmp_path / "clean"
    pair.train(lost, 1, 3, train)
    pair.train(other, 1, 1, train)  # the other run takes the place of the first in memory
    answer = pair.train(lost, 4, 4, train)
    assert answer["progress"][0] == "loading checkpoint 2"
    assert "num_replay_differences" not in answer["metrics"]
    pair.train(clean, 1, 4, train)
    assert read_weights(lost, 4) == read_weights(clean, 4)


def test_a_refused_batch_is_refused_by_all_and_the_next_one_trained(pair: Pair, tmp_path: Path) -> None:
    train = build_train("fsdp")
    assert "the batch is empty" in pair.train(tmp_path, 1, 1, train, bad_batch=True)["error"]
    assert pair.train(tmp_path, 1, 1, train)["metrics"]["num_processes"] == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_killed_process_ends_all_and_the_next_start_goes_on(pair: Pair, tmp_path: Path, parallel: str) -> None:
    """`torchrun -m trainer` over stored batches, killed after its first step: to the weights of a clean run."""
    killed, clean = tmp_path / "killed", tmp_path / "clean"
    train = build_train(parallel, checkpoint_every=4, on_replay_difference="fail")
    store_requests(killed, train, last=6)
    with subprocess.Popen(build_command(killed), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        follower = read_until(process.stderr, r"rank 1 of 2 follows \(process (\d+)\)")
        assert json.loads(process.stdout.readline())["step"] == 1
        os.kill(int(follower), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "LostRankError: " in errors
    assert not (killed / "run" / "steps" / "step_000006.json").exists()

    subprocess.run(build_command(killed), capture_output=True, timeout=100, check=True)
    pair.train(clean, 1, 6, train)
    assert read_weights(killed, 6) == read_weights(clean, 6)
    steps = [json.loads(line)["step"] for line in (killed / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def store_requests(root: Path, train: TrainSection, last: int) -> None:
    """A directory of requests, as a run leaves it behind."""
    save_model(root / "model")
    (root / "requests").mkdir()
    for step in range(1, last + 1):
        path = root / "requests" / f"step_{step:06d}.json"
        path.write_text(build_request(root, step, train).model_dump_json())


def build_command(root: Path) -> list[str]:
    return [*TORCHRUN, "-m", "trainer", "--threads", "1", str(root / "requests")]


def read_until(stream: IO[str], pattern: str) -> str:
    """The first group of the first line that matches."""
    for line in stream:
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"no line matches {pattern}")


def test_stored_batches_train_elsewhere_without_temporal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory of requests in one command, in a process that never imports Temporal; then they are looked up."""
    train_alone(tmp_path, 1, 3, build_train("ddp"))
    command = [str(tmp_path / "run" / "requests"), "--threads", "1", "--run-dir", str(tmp_path / "copy" / "run")]
    script = (
        f"import sys; from trainer.__main__ import main; code = main({command!r}); "
        "sys.exit(code or 3 * any(name.split('.')[0] == 'temporalio' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    capsys.readouterr()
    assert main(command) == 0
    for text, applied in ((done.stdout, True), (capsys.readouterr().out, False)):
        results = [json.loads(line) for line in text.splitlines()]
        assert [(result["step"], result["applied"]) for result in results] == [(n, applied) for n in (1, 2, 3)]
    assert read_weights(tmp_path / "copy", 3) == read_weights(tmp_path, 3)
