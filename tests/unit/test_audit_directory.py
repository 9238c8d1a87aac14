"""The audit of requests, settings and what is kept in a run directory, and of the bounds on open groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everroll.audit.account import Account
from everroll.audit.bounds import Bounds
from everroll.audit.evidence import (
    Changed,
    Generation,
    Recorded,
    RunFiles,
    RunHistory,
    RunRecordFile,
    SealedDirectory,
    StepRecordFile,
)
from everroll.audit.kept import check_kept
from everroll.audit.report import Breach, Findings
from everroll.audit.requests import check_marks, check_requests
from everroll.audit.run_settings import check_run_record
from everroll.audit.settlement import settle_groups
from everroll.audit.steps import check_steps
from everroll.contracts.rollout import BlobRef, DatasetRef
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import (
    ForkOrigin,
    GroupBatchItem,
    LedgerMark,
    TrainRequest,
    TrainResult,
    Weights,
)
from tests.simulation import build_spec

SPEC = build_spec("kept", "queue")
DATA = DatasetRef(path="data", fingerprint="0", num_prompts=5, seed=1, shuffle=False)
ORIGIN = ForkOrigin(run="origin", run_dir="/origin", step=2)
PLAIN = Generation("a", None, [])
RESTORING = Generation("r", None, [], restores=True)


def request(step: int, **update: Any) -> TrainRequest:
    item = GroupBatchItem(group=step, manifest=BlobRef(uri=f"{step}", sha256="0", num_bytes=1))
    own = TrainRequest(
        run="kept", run_dir="", step=step, seed=3, store_url="", batch=[item], model=SPEC.model, train=SPEC.train
    )
    return own.model_copy(update={"mark": LedgerMark(next_group=step + 1), **update})


def record(step: int, **update: Any) -> StepRecordFile:
    own = request(step)
    result = TrainResult(step=step, weights=Weights(version=step, path=""), metrics={"loss": float("nan")})
    made = StepRecordFile(
        batch=own.batch,
        weights_sha256={},
        result=result,
        mark=own.mark,
        parent_sha256={},
        checkpoint_sha256={"optimizer.safetensors": "0"},
    )
    return made.model_copy(update=update)


def build_files(num_steps: int, **update: Any) -> RunFiles:
    steps = range(1, num_steps + 1)
    own: dict[str, Any] = {
        "path": Path(),
        "records": {step: record(step) for step in steps},
        "requests": {step: request(step) for step in steps},
        "unreadable": {},
        "metric_lines": [],
        "malformed_line": None,
        "weights": [],
        "checkpoints": [],
    }
    return RunFiles(**{**own, **update})


def build_account(num_steps: int, **update: Any) -> Account:
    """Steps that the history tells of."""
    steps = range(1, num_steps + 1)
    requests = {step: request(step) for step in steps}
    return Account(**{"requests": requests, "applied": {step: record(step).result for step in steps}, **update})


def build_history(*generations: Generation, state: str = "completed", **update: Any) -> RunHistory:
    return RunHistory(SPEC, DATA, list(generations) or [PLAIN], state, **update)


# Requests


def find_requests(
    files: RunFiles, account: Account, *generations: Generation, pruned_until: float = -1
) -> list[Breach]:
    findings = Findings()
    check_requests(build_history(*generations), account, files, pruned_until, findings)
    return findings.breaches


def test_requests_are_those_that_were_handed_over() -> None:
    assert find_requests(build_files(2), build_account(2)) == []
    files = build_files(2, requests={1: request(1, seed=4), 2: None})
    first, second = find_requests(files, build_account(2))
    assert (first.step, first.field, first.expected, first.found) == (1, "seed", "3", "4")
    assert (second.step, second.message) == (2, "the step's request cannot be read")


def test_requests_that_were_let_go_of() -> None:
    files = build_files(3, requests={3: request(3)})
    assert find_requests(files, build_account(3), pruned_until=2) == []
    assert [breach.step for breach in find_requests(files, build_account(3), pruned_until=1)] == [2]


def test_requests_of_a_time_whose_history_is_gone() -> None:
    """Held to the records of their steps."""
    files, account = build_files(2), Account(by_record=2)
    assert find_requests(files, account, RESTORING, PLAIN) == []
    files.requests[1] = request(2)
    files.requests[2] = request(2, mark=LedgerMark(next_group=9))
    breaches = find_requests(files, account, RESTORING, PLAIN)
    assert [(breach.step, "batch" in breach.message, "mark" in breach.message) for breach in breaches] == [
        (1, True, False),
        (1, False, False),
        (1, False, True),
        (2, False, True),
    ]


def test_a_request_that_was_under_way_when_an_execution_ended() -> None:
    files = build_files(2)
    files.requests[3] = request(3, seed=9)
    assert [breach.step for breach in find_requests(files, build_account(2))] == [3]
    assert find_requests(files, build_account(2, asked_in_vain={3: [request(3, seed=9)]})) == []
    lost = build_account(2, by_record=2)
    assert find_requests(files, lost, RESTORING, PLAIN) == [], "the history may have been lost"
    assert find_requests(files, build_account(2, by_record=1), RESTORING, PLAIN) != [], "step 2 came after the resume"


def test_marks() -> None:
    findings, account = Findings(), build_account(3)
    files = build_files(3)
    files.records[2] = record(2, mark=LedgerMark(next_group=3, dropped=[1]))
    files.records[3] = record(3, mark=None, parent_sha256=None)  # of an earlier version
    check_marks(account, files, findings)
    assert [breach.step for breach in findings.breaches] == [2]
    assert findings.breaches[0].found == "next_group=3 dropped=[1]"


# Settings


def set_rate(rate: float) -> RunSpec:
    return SPEC.model_copy(update={"train": SPEC.train.model_copy(update={"learning_rate": rate})})


def find_settings(spec: RunSpec, *events: Changed | Recorded, state: str = "completed") -> list[Breach]:
    history = build_history(Generation("a", None, list(events), spec=SPEC), state=state)
    findings = Findings()
    account = settle_groups(history, Findings())
    check_run_record(history, account, build_files(0, run_record=RunRecordFile(spec=spec)), findings)
    return findings.breaches


def test_settings_are_those_that_the_run_had_last() -> None:
    changed = Changed(set_rate(0.25))
    assert find_settings(SPEC) == []
    assert find_settings(set_rate(0.25), changed) == []
    (breach,) = find_settings(SPEC, changed)
    assert breach.expected == "train.learning_rate = 0.25"
    assert breach.found == f"train.learning_rate = {SPEC.train.learning_rate}"


def test_a_change_that_a_terminated_run_may_not_have_written() -> None:
    """Those before one that it did write are overwritten."""
    events: list[Changed | Recorded] = [Changed(set_rate(0.25)), Recorded(set_rate(0.25)), Changed(set_rate(0.5))]
    assert find_settings(set_rate(0.25), *events, state="terminated") == []
    assert find_settings(set_rate(0.5), *events, state="terminated") == []
    assert find_settings(SPEC, *events, state="terminated") != []
    assert find_settings(SPEC, *events, state="running") == []


@pytest.mark.parametrize(
    ("generations", "origin", "is_breach"),
    [
        ([PLAIN], None, False),
        ([PLAIN], ORIGIN, True),
        ([Generation("f", None, [], restores=True, fork=ORIGIN), PLAIN], ORIGIN, False),
        ([Generation("f", None, [], restores=True, fork=ORIGIN), PLAIN], None, True),
        ([RESTORING, PLAIN], ORIGIN, False),
    ],
    ids=["plain", "no fork", "fork", "another origin", "history lost"],
)
def test_where_a_fork_comes_from(generations: list[Generation], origin: ForkOrigin | None, is_breach: bool) -> None:
    findings = Findings()
    files = build_files(0, run_record=RunRecordFile(spec=SPEC, forked_from=origin))
    check_run_record(build_history(*generations, state="running"), Account(), files, findings)
    assert bool(findings.breaches) == is_breach


# What is kept


def held(*steps: int) -> list[SealedDirectory]:
    return [SealedDirectory(step, Path(), None, {}) for step in steps]


def find_kept(files: RunFiles, account: Account) -> tuple[list[str], list[str]]:
    findings = Findings()
    check_kept(account, files, findings)
    return [breach.message for breach in findings.breaches], findings.notes


def test_weights_and_checkpoints_that_are_gone_are_named() -> None:
    files = build_files(5, weights=held(4, 5), checkpoints=held(3, 5))
    breaches, (note,) = find_kept(files, build_account(5))
    assert breaches == []
    assert note.startswith("weights of steps 1-3 and checkpoints of steps 1-2, 4 are not there any more")


def test_the_newest_checkpoint_must_be_there() -> None:
    """The newest is the one that settings or record say was written."""
    train = SPEC.train.model_copy(update={"checkpoint_every": 2})
    files = build_files(3, checkpoints=held(1))
    files.records.update({step: record(step, checkpoint_sha256=None) for step in (1, 2, 3)})
    account = build_account(3, requests={step: request(step, train=train) for step in (1, 2, 3)})
    assert find_kept(files, account)[0] == ["the newest checkpoint is gone"]
    files.checkpoints[:] = held(2)
    assert find_kept(files, account)[0] == []


def test_a_fork_has_the_one_checkpoint_that_it_begins_from() -> None:
    files = build_files(3, checkpoints=held(1), weights=held(3), forked_at=3)
    assert find_kept(files, Account(by_record=3))[0] == []
    files.checkpoints.clear()
    assert find_kept(files, Account(by_record=3))[0] == ["the run has no checkpoint to go on from"]


# Metrics


def test_a_metric_that_is_no_number_equals_itself() -> None:
    files = build_files(1, weights=held(1), metric_lines=[(1, {"loss": float("nan")})])
    account = build_account(1)
    findings = Findings()
    check_steps(account, files, SPEC.train, findings)
    assert [breach for breach in findings.breaches if "has no manifest" not in breach.message] == []
    files.metric_lines[0][1]["loss"] = 0.5
    account.applied[1] = account.applied[1].model_copy(update={"metrics": {"loss": 0.25}})
    findings = Findings()
    check_steps(account, files, SPEC.train, findings)
    values = [(breach.field, breach.expected, breach.found) for breach in findings.breaches]
    assert ("loss", "0.25", "nan") in values
    assert ("loss", "nan", "0.5") in values


# Bounds


def open_groups(spec: RunSpec, number: int, bounds: Bounds | None = None, task: int = 0) -> list[Breach]:
    account, findings = Account(in_flight=set(range(number))), Findings()
    (bounds or Bounds(spec)).check(account, number, task, findings)
    return findings.breaches


def test_no_more_groups_are_open_than_settings_allow() -> None:
    spec = build_spec("bounded", "queue", rollout={"max_staleness": 1, "oversample_groups": 1})
    assert open_groups(spec, 5) == []
    (breach,) = open_groups(spec, 6)
    assert (breach.invariant.value, breach.expected, breach.found) == ("I5", "at most 5", "6")
    capped = build_spec("bounded", "queue", rollout={"max_staleness": 1, "max_groups_in_flight": 2})
    (breach,) = open_groups(capped, 3)
    assert "groups are in flight" in breach.message


def test_bounds_that_were_lowered() -> None:
    """What was dispensed in the workflow task that took the change in may go by either."""
    spec = build_spec("bounded", "queue", rollout={"max_staleness": 1})
    bounds = Bounds(spec)
    bounds.change(build_spec("bounded", "queue"), task=7)
    assert open_groups(spec, 4, bounds, task=7) == []
    assert len(open_groups(spec, 4, bounds, task=8)) == 1
