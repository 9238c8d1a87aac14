"""Copies of a run's metrics: each step once whatever is lost, and never a step failed for them."""

from __future__ import annotations

import importlib.util
import json
import logging
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.evaluation import _finish as finish
from everroll.contracts.evaluation import Estimate, EvaluationRecord, FinishEvaluationRequest
from everroll.contracts.outcomes import TrainingError
from everroll.contracts.spec import MetricsSpec, TrainSection
from tests.trainer_helpers import build_prepare_request, build_request
from trainer.service import Trainer
from trainer.sinks import MetricSinks
from trainer.tracking import Entry, TensorBoardSink

TENSORBOARD = MetricsSpec(tensorboard=True)
EXPECTED = {
    "loss", "reward_mean", "reward_min", "reward_max", "advantage_abs_mean", "clip_share", "logprob_gap_mean",
    "sampler_kl_k3", "entropy", "reference_kl", "grad_norm", "learning_rate", "num_tokens", "num_sampled_tokens",
    "tokens_per_second", "gradient_seconds", "reference_seconds", "optimizer_seconds", "load_batch_seconds",
    "save_weights_seconds", "peak_memory_bytes",
}  # fmt: skip

TRACKIO = '''
"""The part of trackio's surface that a run uses; writes calls to a file."""
import json, os

class Run:
    def log(self, metrics, step=None):
        with open(os.environ["CALLS"], "a") as file:
            print(json.dumps(["log", step, metrics]), file=file)
    def finish(self):
        with open(os.environ["CALLS"], "a") as file:
            print(json.dumps(["finish"]), file=file)

def init(project, name=None, resume="never"):
    with open(os.environ["CALLS"], "a") as file:
        print(json.dumps(["init", project, name, resume]), file=file)
    return Run()
'''


def _read_events(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """Every event that holds values, in the order of the files."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    events = []
    for path in sorted(directory.glob("events.*")):
        for content in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(content)
            if event.summary.value:
                events.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
    return events


def _record(root: Path, *steps: int) -> None:
    with (root / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": step / 8}) + "\n")


def _evaluate(root: Path, version: int, name: str = "eval", **values: Any) -> None:
    """As the activity writes a result down; asked twice, it writes once."""
    reward = Estimate(value=version / 4, low=0.0, high=1.0, num_prompts=3)
    values = {
        "num_episodes": 3,
        "mean_reward": reward,
        "pass_at": {"1": reward},
        "agent_metrics": {"a/b": 2.0},
        **values,
    }
    record = EvaluationRecord(name=name, version=version, **values)
    for _ in range(2):
        finish(FinishEvaluationRequest(run="run", run_dir=str(root), store_url=str(root / "store"), record=record))


def test_each_step_is_in_the_record_and_in_tensorboard_once(tmp_path: Path) -> None:
    """A trainer lost after step 2 that trains it again, and one whose record of step 3 was lost on the way."""
    train = TrainSection(device="cpu", learning_rate=1e-2, kl_coef=0.1, checkpoint_every=3, metrics=TENSORBOARD)
    trainer = Trainer()
    trainer.prepare(build_prepare_request(tmp_path, train))
    for step in (1, 2, 3):
        trainer.train_step(build_request(tmp_path, step, train), lambda text: None)
        if step == 2:
            trainer.close()
            trainer = Trainer()
    trainer.close()
    (tmp_path / "run/steps/step_000003.json").unlink()
    trainer = Trainer()
    trainer.train_step(build_request(tmp_path, 3, train), lambda text: None)
    trainer.close()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0].keys() >= EXPECTED
    events = _read_events(tmp_path / "run/tensorboard")
    assert [step for step, _ in events] == [1, 2, 3]
    for line, (_, values) in zip(lines, events, strict=True):
        del line["step"]
        assert values == pytest.approx({f"train/{name}": value for name, value in line.items()}, rel=1e-6)


def test_a_step_that_a_crash_kept_from_tensorboard_is_written_later(tmp_path: Path) -> None:
    _record(tmp_path, 1, 2)
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(Entry(1, {"loss": 0.125}))
    sink.close()
    with next((tmp_path / "tensorboard").glob("events.*")).open("ab") as file:
        file.write(b"half an eve")  # cut short by the crash
    sinks = MetricSinks(tmp_path, "run", TENSORBOARD)
    sinks.sync()
    _record(tmp_path, 3)
    sinks.sync()
    sinks.close()
    assert [(step, values["train/loss"]) for step, values in _read_events(tmp_path / "tensorboard")] == [
        (1, 0.125), (2, 0.25), (3, 0.375)
    ]  # fmt: skip


def test_evaluations_stand_beside_the_steps_once(tmp_path: Path) -> None:
    """Whenever they end, under the version that they are of; a failure has no numbers, and what is there stays."""
    _record(tmp_path, 1, 2)
    _evaluate(tmp_path, 0)
    _evaluate(tmp_path, 1, "maths", failure="the store is full")
    for late in (None, 1, 2):
        sinks = MetricSinks(tmp_path, "run", TENSORBOARD)
        sinks.sync()
        if late is not None:
            _evaluate(tmp_path, late, "maths", num_episodes=0, mean_reward=None, pass_at={}, lost={"agent": 3})
            sinks.sync()
        sinks.close()
    events = _read_events(tmp_path / "tensorboard")
    assert [(step, sorted(values)[0].rpartition("/")[0]) for step, values in events] == [
        (0, "eval"), (1, "train"), (2, "train"), (1, "eval/maths"), (2, "eval/maths")
    ]  # fmt: skip
    assert events[0][1] == {
        "eval/num_episodes": 3, "eval/num_lost": 0, "eval/mean_sampled_tokens": 0, "eval/agent_a_b": 2,
        "eval/reward_mean": 0, "eval/reward_mean_low": 0, "eval/reward_mean_high": 1,
        "eval/pass_at_1": 0, "eval/pass_at_1_low": 0, "eval/pass_at_1_high": 1,
    }  # fmt: skip
    assert events[3][1].keys() == {
        f"eval/maths/{name}" for name in ("num_episodes", "num_lost", "mean_sampled_tokens", "agent_a_b")
    }
    assert events[3][1]["eval/maths/num_lost"] == 3


def test_an_evaluation_that_ends_after_the_last_step_is_written(tmp_path: Path) -> None:
    """No step follows that would bring it; one that ends just before the trainer does is not lost either."""
    train = TrainSection(device="cpu", metrics=TENSORBOARD)
    trainer = Trainer()
    trainer.prepare(build_prepare_request(tmp_path, train))
    trainer.train_step(build_request(tmp_path, 1, train), lambda text: None)
    run = tmp_path / "run"
    _evaluate(run, 1)
    deadline = time.monotonic() + 60
    while (1, "eval") not in _list_events(run):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    _evaluate(run, 1, "late")
    trainer.close()
    assert _list_events(run) == [(1, "train"), (1, "eval"), (1, "eval/late")]


def _list_events(run: Path) -> list[tuple[int, str]]:
    return [(step, next(iter(values)).rpartition("/")[0]) for step, values in _read_events(run / "tensorboard")]


def test_a_failing_sink_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    sinks = MetricSinks(tmp_path, "run", TENSORBOARD)
    with caplog.at_level(logging.WARNING):
        _record(tmp_path, 1)
        sinks.sync()
    sinks.close()
    assert "metrics sink tensorboard cannot be opened, the run goes on without it" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("trackio") is not None, reason="trackio is installed")
def test_a_missing_package_is_told_before_the_first_step(tmp_path: Path) -> None:
    train = TrainSection(device="cpu", metrics=MetricsSpec(trackio_project="p"))
    with pytest.raises(TrainingError, match="asks for trackio, which is not installed: pip install trackio"):
        Trainer().prepare(build_prepare_request(tmp_path, train))
    assert not (tmp_path / "run").exists()


def test_a_service_gets_each_step_under_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of trackio's run, which a package of that name receives."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    for steps in ([1, 2], [3]):
        _record(tmp_path, *steps)
        sinks = MetricSinks(tmp_path, "mine", MetricsSpec(trackio_project="p"))
        sinks.sync()
        sinks.close()
    sys.modules.pop("trackio", None)
    calls: list[list[Any]] = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    init = ["init", "p", "mine", "allow"]
    logs = [["log", step, {"loss": step / 8}] for step in (1, 2, 3)]
    assert calls == [init, *logs[:2], ["finish"], init, logs[2], ["finish"]]


@pytest.mark.slow
def test_wandb_takes_steps_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, where it is installed, writing to a directory."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks = MetricSinks(tmp_path, "mine", MetricsSpec(wandb_project="p"))
    _record(tmp_path, 1, 2)
    sinks.sync()
    _evaluate(tmp_path, 1)  # of an earlier step than the last one
    sinks.sync()
    sinks.close()
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"last_step": 2, "evaluated": ["eval@1"]}
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-mine.wandb")
    rows = _read_wandb(path)
    assert [(row["step"], row.get("loss"), row.get("eval/reward_mean")) for row in rows] == [
        (1, 0.125, None), (2, 0.25, None), (1, None, 0.25)
    ]  # fmt: skip


def _read_wandb(path: Path) -> list[dict[str, Any]]:
    """What was logged, row by row."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for content in _read_leveldb_log(path.read_bytes(), 7):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def _read_leveldb_log(content: bytes, position: int) -> Iterator[bytes]:
    """Records of LevelDB's log format: blocks of 32 KiB, chunks with checksum, length and a type (1, or 2 to 4)."""
    body = b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        size, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        body += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield body
            body = b""
