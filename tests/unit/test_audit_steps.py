"""The audit of run directories that the trainer itself wrote: what led to what, and what checkpoints hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from everroll.audit.account import Account
from everroll.audit.openness import leave_out_later
from everroll.audit.report import Findings
from everroll.audit.sources import read_run_files
from everroll.audit.steps import check_steps
from everroll.contracts.spec import TrainSection
from tests.audit_helpers import reseal
from tests.trainer_helpers import build_prepare_request, build_request
from trainer.rundir import RunDirectory
from trainer.service import Trainer


def build_train(**values: object) -> TrainSection:
    return TrainSection.model_validate({"device": "cpu", "learning_rate": 1e-2, **values})


def take_steps(root: Path, train: TrainSection, first: int, last: int) -> None:
    """In a trainer that knows nothing of earlier steps but what is on disk."""
    trainer = Trainer()
    trainer.prepare(build_prepare_request(root, train))
    try:
        for step in range(first, last + 1):
            trainer.train_step(build_request(root, step, train), lambda text: None)
    finally:
        trainer.close()


def audit(root: Path, train: TrainSection, *, num_heard: int | None = None) -> Findings:
    """Against the account of a run that asked for these steps, and has heard of the first `num_heard` of them."""
    run = RunDirectory(root / "run")
    account = Account()
    for step in range(1, (num_heard or run.latest_applied()) + 1):
        request, record = build_request(root, step, train), run.read_record(step)
        assert record is not None
        account.requests[step], account.applied[step] = request, record.result
    findings, files = Findings(), read_run_files(root / "run")
    if num_heard is not None:
        files = leave_out_later(files, account)
    check_steps(account, files, train, findings, is_open=num_heard is not None)
    assert findings.checks
    return findings


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def lose_the_trainer(root: Path, train: TrainSection) -> None:
    """Two steps, and a third by a trainer that has to train them again, and gets other weights: another rate."""
    take_steps(root, train, 1, 2)
    edit(root / "run" / "requests" / "step_000001.json", train=build_train(learning_rate=5e-2).model_dump(mode="json"))
    take_steps(root, train, 3, 3)


@pytest.mark.parametrize(
    "values",
    [{}, {"publish_dtype": "bfloat16"}, {"lora": {"rank": 2}}, {"checkpoint_every": 2}],
    ids=["float32", "bfloat16", "lora", "sparse"],
)
def test_what_an_honest_trainer_leaves(tmp_path: Path, values: dict[str, object]) -> None:
    """Also where one trainer goes on from another's checkpoint, and from the weights that the first step began with."""
    train = build_train(**values)
    take_steps(tmp_path, train, 1, 1)
    take_steps(tmp_path, train, 2, 3)
    findings = audit(tmp_path, train)
    assert [str(breach) for breach in findings.breaches] == []
    lineage = next(line for (_, what), line in findings.checks.items() if what.startswith("each step was applied to"))
    assert lineage.num_checked >= 2


def test_a_setting_that_was_changed_before_the_trainer_was_lost(tmp_path: Path) -> None:
    """Steps that are trained again publish as they did the first time, whatever the run publishes now."""
    first, later = build_train(checkpoint_every=4), build_train(checkpoint_every=4, publish_dtype="bfloat16")
    take_steps(tmp_path, first, 1, 2)
    take_steps(tmp_path, later, 3, 3)
    assert [str(breach) for breach in audit(tmp_path, first).breaches] == []


def test_other_weights_after_a_lost_trainer_are_a_breach(tmp_path: Path) -> None:
    train = build_train(checkpoint_every=4)
    lose_the_trainer(tmp_path, train)
    (breach,) = audit(tmp_path, train).breaches
    assert breach.step == 3
    assert "applied to other weights than are on record" in breach.message
    assert breach.found == "2 steps gave others"


def test_other_weights_are_noted_where_no_bits_are_promised(tmp_path: Path) -> None:
    train = build_train(checkpoint_every=4)
    lose_the_trainer(tmp_path, train)
    edit(tmp_path / "run" / "steps" / "step_000003.json", device="cuda")
    findings = audit(tmp_path, train)
    assert findings.breaches == []
    (note,) = findings.notes
    assert note.startswith("1 steps (3) were applied, after a lost trainer, to weights that differ")
    strict = build_train(checkpoint_every=4, on_replay_difference="fail")
    assert "on record" in audit(tmp_path, strict).breaches[0].message


@pytest.mark.parametrize(("device", "is_breach"), [("cpu", True), ("auto", False), ("cuda", False)])
def test_a_record_that_does_not_name_its_device(tmp_path: Path, device: str, is_breach: bool) -> None:
    """Bits are promised only where the run asked for a CPU: what is chosen by itself may be an accelerator."""
    lose_the_trainer(tmp_path, build_train(checkpoint_every=4))
    edit(tmp_path / "run" / "steps" / "step_000003.json", device=None)
    assert bool(audit(tmp_path, build_train(checkpoint_every=4, device=device)).breaches) == is_breach


@pytest.mark.parametrize("what", ["processes", "threads"])
def test_other_weights_are_noted_where_they_were_computed_otherwise(tmp_path: Path, what: str) -> None:
    """By fewer processes, or of fewer threads, than the steps that were trained again."""
    train = build_train(checkpoint_every=4)
    lose_the_trainer(tmp_path, train)
    record = RunDirectory(tmp_path / "run").read_record(1)
    assert record is not None
    assert record.num_threads == torch.get_num_threads()
    if what == "threads":
        edit(tmp_path / "run" / "steps" / "step_000001.json", num_threads=record.num_threads + 1)
    else:
        metrics = {**record.result.metrics, "num_processes": 2.0}
        result = record.result.model_copy(update={"metrics": metrics})
        edit(tmp_path / "run" / "steps" / "step_000001.json", result=result.model_dump(mode="json"))
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        lines[0] = json.dumps({"step": 1, **metrics})
        (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    findings = audit(tmp_path, train)
    assert [str(breach) for breach in findings.breaches] == []
    assert len(findings.notes) == 1
    strict = build_train(checkpoint_every=4, on_replay_difference="fail")
    assert "on record" in audit(tmp_path, strict).breaches[0].message


def test_a_difference_is_told_though_the_run_was_prepared_in_between(tmp_path: Path) -> None:
    """Preparing trains the steps again where the weights are gone; the next step is applied to what came of that."""
    train = build_train(checkpoint_every=4)
    take_steps(tmp_path, train, 1, 2)
    shutil.rmtree(tmp_path / "run" / "weights" / "step_000002")
    edit(
        tmp_path / "run" / "requests" / "step_000001.json",
        train=build_train(learning_rate=5e-2).model_dump(mode="json"),
    )
    take_steps(tmp_path, train, 3, 3)
    record = RunDirectory(tmp_path / "run").read_record(3)
    assert record is not None
    assert record.result.metrics["num_replay_differences"] == 2


def test_a_step_that_was_applied_to_other_weights_in_silence(tmp_path: Path) -> None:
    train = build_train()
    take_steps(tmp_path, train, 1, 2)
    edit(tmp_path / "run" / "steps" / "step_000002.json", parent_sha256={"model.safetensors": "0" * 64})
    messages = [breach.message for breach in audit(tmp_path, train).breaches]
    assert messages[0] == "it was applied to other weights than the step before has on record"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "optimizer.safetensors"),
        ({"publish_dtype": "bfloat16"}, "model.safetensors"),
        ({"lora": {"rank": 2}}, "optimizer.safetensors"),
    ],
)
def test_a_checkpoint_that_was_changed_and_sealed_again(tmp_path: Path, values: dict[str, object], name: str) -> None:
    train = build_train(**values)
    take_steps(tmp_path, train, 1, 1)
    directory = tmp_path / "run" / "checkpoints" / "step_000001"
    body = bytearray((directory / name).read_bytes())
    body[-1] ^= 1
    (directory / name).unlink()  # others may share the file
    (directory / name).write_bytes(body)
    reseal(directory)
    (breach,) = audit(tmp_path, train).breaches
    assert breach.step == 1
    assert breach.message.endswith(f"{name} is not what the step made")


def test_a_record_that_was_made_from_its_checkpoint(tmp_path: Path) -> None:
    """A trainer that was killed between the two: the record is written by the next, with the checkpoint's hashes."""
    train = build_train()
    take_steps(tmp_path, train, 1, 2)
    record = tmp_path / "run" / "steps" / "step_000002.json"
    before = record.read_bytes()
    record.unlink()
    take_steps(tmp_path, train, 2, 2)
    assert record.read_bytes() == before
    assert audit(tmp_path, train).breaches == []


def test_steps_that_an_open_run_has_taken_since(tmp_path: Path) -> None:
    """What its history does not know yet is no breach, nor that the weights of the newest known step are gone."""
    train = build_train(keep_weights=2)
    take_steps(tmp_path, train, 1, 4)
    findings = audit(tmp_path, train, num_heard=2)
    assert [str(breach) for breach in findings.breaches] == []
    edit(tmp_path / "run" / "steps" / "step_000001.json", batch=[])
    assert {breach.step for breach in audit(tmp_path, train, num_heard=2).breaches} == {1}
