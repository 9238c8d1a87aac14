"""The audit of a run's own account in its directory: what was asked of it, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from everroll.audit.account import Account
from everroll.audit.evidence import Generation, RunFiles, RunHistory
from everroll.audit.records import check_dropped, check_settled, check_steerings
from everroll.audit.report import Breach, Findings
from everroll.audit.resumption import BY_RECORD
from everroll.audit.sources import read_run_files
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import BlobRef, GroupResult
from everroll.contracts.steering import Change, SteeringRecord
from everroll.contracts.training import RunState
from everroll.run_record import RunRecordDirectory
from tests.simulation import build_spec

RECORDS = [
    SteeringRecord(number=1, at=10.0, action="pause", by="ada@host", step=1),
    SteeringRecord(number=2, at=11.5, action="set", step=2, changes={"train.learning_rate": Change(old=0.1, new=0.2)}),
    SteeringRecord(number=3, at=12.0, action="skip", group=5, step=2),
]


def check(root: Path, generations: list[Generation] | None = None) -> list[Breach]:
    files: RunFiles = read_run_files(root)
    generations = generations or [Generation("id", None, [], steerings=RECORDS)]
    history = RunHistory(build_spec("steered", "queue"), None, generations, "completed")
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


def test_a_last_line_that_a_crash_cut_short_is_none(root: Path) -> None:
    with (root / "steering.jsonl").open("ab") as file:
        file.write(b'{"number": 4, "at"')
    assert check(root) == []


def test_a_line_that_nobody_asked_for(root: Path) -> None:
    """Also one that says the run was resumed, where it was not."""
    forged = SteeringRecord(number=4, at=13.0, action="resumed", by="nobody@host")
    RunRecordDirectory(root).append_steerings([forged])
    (breach,) = check(root)
    assert (breach.expected, breach.found) == ("no such line", "resumed by nobody@host")
    assert check(root, [Generation("id", None, [], steerings=RECORDS), Generation("b", None, [], restores=True)]) == []


def test_what_was_asked_before_the_history_begins(root: Path) -> None:
    """Where Temporal's database was lost: the state that the run goes on with says how much that was."""
    restoring = Generation("a", None, [], restores=True)
    for number, breaches in ((3, 0), (2, 1)):
        start = RunState(num_steerings=number)
        assert len(check(root, [restoring, Generation("b", start, [])])) == breaches


def test_what_was_about_to_be_written_may_be_there(root: Path) -> None:
    """The history of a terminated run ends before it hears that it was."""
    generation = Generation("id", None, [], steerings=RECORDS[:2], steerings_under_way=RECORDS)
    assert check(root, [generation]) == []


# Groups that were settled

MANIFEST = BlobRef(uri="blob", sha256="0", num_bytes=1)
TOLD = GroupResult(group=0, manifest=MANIFEST, num_episodes=2, mean_reward=0.5, duration_seconds=3.0)


def find_settled(
    root: Path, *recorded: GroupResult, told: GroupResult = TOLD, fate: str = "trained", is_open: bool = False
) -> list[Breach]:
    """Of a run that dispensed group 0 alone, and was `told` of it."""
    for result in recorded:
        RunRecordDirectory(root).write_settled(result)
    account = Account(dispensed={0: None}, results={0: told}, fates={0: fate})
    findings = Findings()
    trained = {0: MANIFEST} if fate == "trained" else {}
    check_settled(read_run_files(root), account, trained, findings, is_open=is_open)
    return findings.breaches


def test_settled_groups_are_on_record_as_the_run_was_told(tmp_path: Path) -> None:
    """But for how long they took, which is known only afterwards."""
    assert find_settled(tmp_path, TOLD.model_copy(update={"duration_seconds": 0.0})) == []


@pytest.mark.parametrize("recorded", [TOLD, GroupResult(group=0)])
def test_what_the_run_dropped_itself_has_its_cause(tmp_path: Path, recorded: GroupResult) -> None:
    """Of a group that waited to be played again nothing else is written."""
    stale = recorded.model_copy(update={"manifest": None, "dropped": Cause(kind=CauseKind.STALE, message="old")})
    assert find_settled(tmp_path, stale, fate="dropped: stale") == []


@pytest.mark.parametrize(
    ("recorded", "field"),
    [
        (TOLD.model_copy(update={"mean_reward": 0.75}), "mean_reward"),
        (TOLD.model_copy(update={"num_episodes": 9}), "num_episodes"),
        (TOLD.model_copy(update={"dropped": Cause(kind=CauseKind.AGENT, message="it failed")}), "dropped"),
    ],
)
def test_a_record_that_tells_otherwise(tmp_path: Path, recorded: GroupResult, field: str) -> None:
    breach = find_settled(tmp_path, recorded)[0]
    assert breach.field == field
    assert breach.expected != breach.found


def test_another_cause_than_the_group_gave(tmp_path: Path) -> None:
    told = drop(0, CauseKind.AGENT)
    recorded = GroupResult(group=0, dropped=Cause(kind=CauseKind.AGENT, message="otherwise"))
    (breach,) = find_settled(tmp_path, recorded, told=told, fate="dropped: agent")
    assert breach.field == "dropped"


def test_a_group_that_a_person_ended_may_have_written_what_it_was(tmp_path: Path) -> None:
    """A later execution of the run is told of its end alone."""
    assert find_settled(tmp_path, TOLD, told=drop(0, CauseKind.SKIPPED), fate="dropped: skipped") == []


def test_records_of_groups_that_an_open_run_dispensed_since(tmp_path: Path) -> None:
    later = TOLD.model_copy(update={"group": 1})
    assert find_settled(tmp_path, TOLD, later, is_open=True) == []
    (breach,) = find_settled(tmp_path, TOLD, later)
    assert (breach.group, breach.expected, breach.found) == (1, "no record", "trainable")


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
