"""The audit of a run's own account in its directory: what was asked of it, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from everroll.audit.account import Account
from everroll.audit.evidence import Generation, RunFiles, RunHistory
from everroll.audit.records import check_dropped, check_steerings
from everroll.audit.report import Breach, Findings
from everroll.audit.resumption import BY_RECORD
from everroll.audit.sources import read_run_files
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import GroupResult
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


# Groups that were dropped


def drop(group: int, kind: CauseKind) -> GroupResult:
    return GroupResult(group=group, dropped=Cause(kind=kind, message="so"))


@pytest.fixture
def account(tmp_path: Path) -> Account:
    """Group 0 dropped itself, group 1 was stale, group 2 was settled before a resume; all on record in `tmp_path`."""
    own, stale, before = drop(0, CauseKind.AGENT), drop(1, CauseKind.STALE), drop(2, CauseKind.DATA)
    for result in (own, stale, before):
        RunRecordDirectory(tmp_path).write_settled(result)
    fates = {0: "dropped: agent", 1: "dropped: stale", 2: BY_RECORD, 3: "in flight"}
    return Account(fates=fates, results={0: own, 1: GroupResult(group=1)})


def find_dropped(root: Path, account: Account, *, has_ended_well: bool = True) -> list[Breach]:
    findings = Findings()
    check_dropped(read_run_files(root), account, findings, has_ended_well=has_ended_well)
    return findings.breaches


def test_dropped_groups_are_on_record(tmp_path: Path, account: Account) -> None:
    assert find_dropped(tmp_path, account) == []


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_dropped_group_whose_record_was_removed(tmp_path: Path, account: Account, group: int) -> None:
    """A resume would have it played again."""
    (tmp_path / "settled" / f"group_{group:08d}.json").unlink()
    (breach,) = find_dropped(tmp_path, account)
    assert (breach.group, breach.expected, breach.found) == (group, account.fates[group], "no record")


def test_a_dropped_group_whose_record_names_another_cause(tmp_path: Path, account: Account) -> None:
    RunRecordDirectory(tmp_path).write_settled(drop(1, CauseKind.SURPLUS))
    (breach,) = find_dropped(tmp_path, account)
    assert (breach.group, breach.found) == (1, "dropped: surplus")


def test_what_a_run_drops_itself_may_still_be_unwritten(tmp_path: Path, account: Account) -> None:
    """Until it has ended well. What a group dropped itself was on record before the run heard of it."""
    for group in (0, 1):
        (tmp_path / "settled" / f"group_{group:08d}.json").unlink()
    assert [breach.group for breach in find_dropped(tmp_path, account, has_ended_well=False)] == [0]
