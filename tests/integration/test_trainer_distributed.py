"""Several trainer processes: the same weights as one, checkpoints that load at another size, and lost processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file

from everroll.contracts.spec import TrainSection
from tests.forked import ForkServer, fork_server
from tests.trainer_helpers import build_prepare_request, build_request, read_weights, save_model
from tests.trainer_ranks_driver import Command
from trainer.__main__ import main
from trainer.service import Trainer

DRIVER = "tests.trainer_ranks_driver"
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
    """Two processes of `tests.trainer_ranks_driver`, which take one command after the other."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        pipes = [folder / "commands", folder / "answers"]
        for pipe in pipes:
            os.mkfifo(pipe)
        self.ranks = server.start_ranks(DRIVER, [], folder / "pair", stdin=pipes[0], stdout=pipes[1])
        self._commands = pipes[0].open("w")
        self._answers = pipes[1].open("r")

    def train(self, root: Path, first: int, last: int, train: TrainSection, bad_batch: bool = False) -> dict[str, Any]:
        command = Command(root=root, first=first, last=last, train=train, bad_batch=bad_batch)
        self._commands.write(command.model_dump_json() + "\n")
        self._commands.flush()
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        self._commands.close()
        self._answers.close()
        assert [rank.wait() for rank in self.ranks] == [0, 0]
        assert "CRITICAL" not in "".join(rank.log.read_text() for rank in self.ranks)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server() as server:
        yield server


@pytest.fixture(scope="module")
def pair(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(server, tmp_path_factory.mktemp("pair"))
    yield pair
    pair.close()


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


def read_tensors(root: Path, step: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(root / "run/weights" / f"step_{step:06d}" / "model.safetensors")
    return tensors


def assert_equal_weights(got: Path, wanted: Path, step: int = 4) -> None:
    """Within rounding: sums over tokens are taken in another order."""
    tensors = [read_tensors(root, step) for root in (got, wanted)]
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


@pytest.mark.parametrize(
    ("parallel", "settings"),
    [
        ("ddp", {"lora": {"rank": 4, "alpha": 8.0}, "kl_coef": 0.1}),
        ("fsdp", {"lora": {"rank": 4, "alpha": 8.0}}),
        ("fsdp", {"kl_coef": 0.1}),
    ],
)
def test_adapters_and_a_reference_with_two_processes(
    pair: Pair, tmp_path: Path, parallel: str, settings: dict[str, Any]
) -> None:
    """A large learning rate and a checkpoint between: step 2 starts from what was loaded, away from the reference."""
    train = build_train(parallel, **settings, learning_rate=1e-2, checkpoint_every=1)
    together, alone = tmp_path / "together", tmp_path / "alone"
    pair.train(together, 1, 1, train)
    pair.train(tmp_path / "other", 1, 1, train)  # takes the place of the first run in memory
    answer = pair.train(together, 2, 2, train)
    assert answer["progress"][0] == "loading checkpoint 1"
    metrics = train_alone(alone, 1, 2, train)
    got, wanted = (read_tensors(root, 2) for root in (together, alone))
    start = load_file(alone / "model" / "model.safetensors")
    moved = [name for name in start if not torch.equal(wanted[name], start[name])]
    assert moved == ([name for name in start if "_proj" in name] if "lora" in settings else list(start))
    assert got.keys() == start.keys()
    for name in moved:
        change = wanted[name] - start[name]
        assert torch.linalg.norm(got[name] - wanted[name]) <= 1e-3 * torch.linalg.norm(change), name
    assert ("reference_kl" in metrics) == ("kl_coef" in settings)
    for name in ("loss", "grad_norm", *(["reference_kl"] if "kl_coef" in settings else [])):
        assert answer["metrics"][name] == pytest.approx(metrics[name], rel=1e-3), name


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


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_killed_process_ends_all_and_the_next_start_goes_on(
    server: ForkServer, pair: Pair, tmp_path: Path, parallel: str
) -> None:
    """`python -m trainer` over stored batches, killed after its first step: to the weights of a clean run."""
    killed, clean = tmp_path / "killed", tmp_path / "clean"
    train = build_train(parallel, checkpoint_every=4, on_replay_difference="fail")
    store_requests(killed, train, last=6)
    ranks = server.start_ranks("trainer", build_arguments(killed), tmp_path / "killed-log")
    wait_for_record(killed, 1)
    os.kill(ranks[1].process, signal.SIGKILL)
    assert ranks[0].wait() == 1  # by itself: nothing looks after these two
    assert ranks[1].wait() == -signal.SIGKILL
    assert "CRITICAL LostRankError: rank 0 of 2: " in ranks[0].log.read_text()
    assert not (killed / "run" / "steps" / "step_000006.json").exists()

    ranks = server.start_ranks("trainer", build_arguments(killed), tmp_path / "again-log")
    assert [rank.wait() for rank in ranks] == [0, 0]
    pair.train(clean, 1, 6, train)
    assert read_weights(killed, 6) == read_weights(clean, 6)
    steps = [json.loads(line)["step"] for line in (killed / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_silent_process_is_noticed_in_the_middle_of_a_step(server: ForkServer, tmp_path: Path) -> None:
    """Stopped, its connections stay open, as when a machine loses its network; rank 0 waits for it in the step."""
    command = Command(root=tmp_path, first=1, last=10_000, train=build_train("ddp"))
    (tmp_path / "commands").write_text(command.model_dump_json() + "\n")
    ranks = server.start_ranks(DRIVER, ["--silence-seconds", "2"], tmp_path / "log", stdin=tmp_path / "commands")
    wait_for_record(tmp_path, 1)
    os.kill(ranks[1].process, signal.SIGSTOP)
    try:
        assert ranks[0].wait(seconds=60) == 1
        ranks[0].read_until("LostRankError: rank 0 of 2: rank 1 was lost")
    finally:
        os.kill(ranks[1].process, signal.SIGKILL)
        ranks[1].wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_ends_with_an_error_when_one_of_its_processes_is_killed(tmp_path: Path) -> None:
    """The real launcher around the same two processes; given again, the command finishes."""
    store_requests(tmp_path, build_train("ddp"), last=40)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*torchrun, "-m", "trainer", *build_arguments(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        follower = read_until(process.stderr, r"rank 1 of 2 follows \(process (\d+)\)")
        assert json.loads(process.stdout.readline())["step"] == 1
        os.kill(int(follower), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "LostRankError: " in errors
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 40


def wait_for_record(root: Path, step: int) -> None:
    deadline = time.monotonic() + 100
    while not (root / "run" / "steps" / f"step_{step:06d}.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def store_requests(root: Path, train: TrainSection, last: int) -> None:
    """A directory of requests, as a run leaves it behind."""
    save_model(root / "model")
    (root / "requests").mkdir()
    for step in range(1, last + 1):
        path = root / "requests" / f"step_{step:06d}.json"
        path.write_text(build_request(root, step, train).model_dump_json())


def build_arguments(root: Path) -> list[str]:
    return ["--threads", "1", str(root / "requests")]


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
