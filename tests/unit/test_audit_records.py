"""The audit of a run's own account in its directory: what was asked of it, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from everroll.audit.evidence import Generation, RunFiles, RunHistory
from everroll.audit.records import check_steerings
from everroll.audit.report import Breach, Findings
from everroll.audit.sources import read_run_files
from everroll.contracts.steering import Change, SteeringRecord
from everroll.run_record import RunRecordDirectory
from tests.simulation import build_spec

RECORDS = [
    SteeringRecord(number=1, at=10.0, action="pause", by="ada@host", step=1),
    SteeringRecord(number=2, at=11.5, action="set", step=2, changes={"train.learning_rate": Change(old=0.1, new=0.2)}),
    SteeringRecord(number=3, at=12.0, action="skip", group=5, step=2),
]


def check(root: Path) -> list[Breach]:
    files: RunFiles = read_run_files(root)
    generation = Generation("id", None, [], steerings=RECORDS)
    history = RunHistory(build_spec("steered", "queue"), None, [generation], "completed")
    findings = Findings()
    check_steerings(history, files, findings)
    assert findings.checks
    return findings.breaches


@pytest.fixture
def root(tmp_path: Path) -> Path:
    RunRecordDirectory(tmp_path).append_steerings(RECORDS)
    return tmp_path


def test_what_was_asked_is_on_record(root: Path) -> None:
    assert check(root) == []


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_steering_record_that_was_removed(root: Path, number: int) -> None:
    path = root / "steering.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: number - 1] + lines[number:]))
    breach = check(root)[-1]
    assert breach.message.startswith(f"number {number} of what was asked")
    assert breach.found == "no such line"


def test_a_steering_record_that_was_changed(root: Path) -> None:
    path = root / "steering.jsonl"
    path.write_text(path.read_text().replace('"new":0.2', '"new":0.3'))
    (breach,) = check(root)
    assert breach.step == 2
    assert (breach.expected, breach.found) == (
        "set train.learning_rate = 0.2 (was 0.1)",
        "set train.learning_rate = 0.3 (was 0.1)",
    )
