"""I3 for the requests in the run directory: what a trainer that goes on, or a run of one side, would train. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles, RunHistory, StepRecordFile
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.training import TrainRequest

REQUESTS = "requests on disk are those that the run made"
MARKS = "steps carry the ledger's mark of their batch"


def check_marks(account: Account, files: RunFiles, findings: Findings) -> None:
    """A resume reads from the marks which groups had started, and which were dropped.

    Records of earlier versions, which name no weights that they were applied to, have none.
    """
    for step, record in sorted(files.records.items()):
        request = account.requests.get(step)
        if request is None or (record.mark is None and record.parent_sha256 is None):
            continue
        breach = _breach(step, "the record's mark is not the one that was handed over", request.mark, record.mark)
        findings.expect(MARKS, record.mark == request.mark, breach)


def check_requests(
    history: RunHistory, account: Account, files: RunFiles, pruned_until: float, findings: Findings
) -> None:
    """One request a step that was taken, as the history has it; none of other steps.

    `pruned_until`: requests up to this step may have been let go of, and so may those that a fork began without.
    """
    plays_only = history.spec.run.mode == "rollout"
    taken = account.applied.keys() if plays_only else files.records.keys()
    for step in sorted(taken - files.requests.keys()):
        breach = _breach(step, "the step's request is not on disk", "a request", "none")
        findings.expect(REQUESTS, step <= max(pruned_until, files.forked_at), breach)
    for step, found in sorted(files.requests.items()):
        if found is None:
            findings.expect(REQUESTS, False, _breach(step, "the step's request cannot be read", "a request", "none"))
        elif step not in files.records and _may_be_left(step, found, history, account, files.records):
            findings.count(Invariant.STEPS, REQUESTS)
        elif step in account.requests:
            _compare(step, account.requests[step], found, findings)
        elif step in files.records:
            _compare_with_record(step, files.records[step], found, findings)
        else:
            breach = _breach(step, "a request is on disk that the run never made", "none", f"step {found.step}")
            findings.expect(REQUESTS, False, breach)


def _may_be_left(
    step: int, found: TrainRequest, history: RunHistory, account: Account, records: Mapping[int, StepRecordFile]
) -> bool:
    """Of a step that was under way when an execution ended, and that the next one did not come to."""
    if found in account.asked_in_vain.get(step, []):
        return True
    if step <= account.by_record and step not in account.requests:
        return True  # of a run that only plays, and whose first executions are gone
    has_unknown = history.is_cut or any(generation.restores for generation in history.generations)
    newest = max(records, default=0)
    return has_unknown and step == newest + 1 == account.by_record + 1 and found.step == step


def _compare(step: int, known: TrainRequest, found: TrainRequest, findings: Findings) -> None:
    ours, theirs = known.model_dump(mode="json"), found.model_dump(mode="json")
    name = next((name for name in ours if ours[name] != theirs[name]), None)
    breach = _breach(step, "the request on disk is not the one that was handed over", "", "")
    if name is not None:
        left, right = _narrow(ours[name], theirs[name])
        breach = _breach(step, breach.message, left, right).model_copy(update={"field": name})
    findings.expect(REQUESTS, name is None, breach)


def _narrow(known: object, found: object) -> tuple[object, object]:
    """Of two sections, the settings that differ."""
    if not isinstance(known, dict) or not isinstance(found, dict):
        return known, found
    names = [name for name in sorted({*known, *found}) if known.get(name) != found.get(name)]
    return {name: known.get(name) for name in names}, {name: found.get(name) for name in names}


def _compare_with_record(step: int, record: StepRecordFile, found: TrainRequest, findings: Findings) -> None:
    """Of a step whose request is in no history any more."""
    known = [item.model_dump() for item in record.batch]
    batch = [item.model_dump() for item in found.batch]
    breach = _breach(step, "the request on disk is for another batch than the step's record", known, batch)
    findings.expect(REQUESTS, known == batch, breach)
    breach = _breach(step, "the request on disk is for another step", step, found.step)
    findings.expect(REQUESTS, found.step == step, breach)
    if record.mark is not None:
        breach = _breach(step, "the request on disk has another mark than the step's record", record.mark, found.mark)
        findings.expect(MARKS, record.mark == found.mark, breach)


def _breach(step: int, message: str, expected: object, found: object) -> Breach:
    values = {"expected": str(expected)[:300], "found": str(found)[:300]}
    return Breach(invariant=Invariant.STEPS, step=step, message=message, **values)
