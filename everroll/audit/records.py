"""The run's own account of itself in its directory, against its history. Pure.

A resume goes on from this account: it must not tell of other groups, or of other settings, than the history does.
"""

from __future__ import annotations

from collections.abc import Mapping

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles, RunHistory
from everroll.audit.report import Breach, Findings, Invariant
from everroll.audit.resumption import BY_RECORD
from everroll.contracts.outcomes import CauseKind
from everroll.contracts.rollout import BlobRef, GroupResult
from everroll.contracts.steering import SteeringRecord

SETTLED = "trained groups are on record as settled with what was trained"
DROPPED = "dropped groups are on record as dropped for their cause"
_PREFIX = "dropped: "
STEERINGS = "what was asked of the run is on record, in order"


def check_settled(
    files: RunFiles, account: Account, trained: Mapping[int, BlobRef], findings: Findings, *, is_open: bool = False
) -> None:
    """Every record is of a group that was dispensed, and tells of it what the run was told.

    Of a run that `is_open`, later records may be of groups that its history did not know of, or that it plays again.
    """
    for number, result in sorted(files.settled.items()):
        found = "a record that cannot be read" if result is None else f"group {result.group}"
        text = "the record of how the group was settled is none of it"
        breach = _breach_of(number, text, f"group {number}", found)
        if not findings.expect(SETTLED, result is not None and result.group == number, breach) or result is None:
            continue
        text = "a group is on record as settled that the run never dispensed"
        breach = _breach_of(number, text, "no record", f"dropped: {result.dropped}" if result.dropped else "trainable")
        findings.expect(SETTLED, is_open or number in account.dispensed, breach)
        told = account.results.get(number)
        fate = account.fates.get(number, "")
        is_own = told is not None and (told.dropped is None or _dropped_itself(told))
        if told is not None and is_own and (not is_open or fate == "trained" or told.dropped is not None):
            _compare_result(number, told, result, fate, findings)
    for group, manifest in sorted(trained.items()):
        result = files.settled.get(group)
        known = result.manifest if result else None
        found = "no record" if result is None else known.uri if known else f"dropped: {result.dropped}"
        text = "the trained group is on record as settled otherwise"
        breach = _breach_of(group, text, manifest.uri, found)
        findings.expect(SETTLED, known == manifest and result is not None and result.dropped is None, breach)


def _compare_result(group: int, told: GroupResult, found: GroupResult, fate: str, findings: Findings) -> None:
    """The record is what the run was told, up to what is known only later; a group that the run itself dropped has its
    cause in place of the manifest, or nothing else where it was to be played again."""
    has_own = fate == "trained" or _dropped_itself(told)
    ours, theirs = _dump(told, keeps_cause=has_own), _dump(found, keeps_cause=has_own)
    name = next((name for name in ours if ours[name] != theirs[name]), None)
    bare = found.dropped is not None and not has_own and _dump(GroupResult(group=group), keeps_cause=False) == theirs
    breach = _breach_of(group, "the record of how the group was settled is not what the run was told", "", "")
    if name is not None:
        values = {"field": name, "expected": str(ours[name])[:200], "found": str(theirs[name])[:200]}
        breach = breach.model_copy(update=values)
    findings.expect(SETTLED, name is None or bare, breach)


def _dump(result: GroupResult, *, keeps_cause: bool) -> dict[str, str]:
    """Field by field as text, so that NaN equals NaN."""
    fate = set() if keeps_cause else {"manifest", "dropped"}
    left_out = {"duration_seconds", "report", *fate}
    return {name: repr(value) for name, value in result.model_dump(exclude=left_out).items()}


def _breach_of(group: int, message: str, expected: str, found: str) -> Breach:
    return Breach(invariant=Invariant.SETTLED_ONCE, group=group, message=message, expected=expected, found=found)


def check_dropped(files: RunFiles, account: Account, findings: Findings, *, has_ended_well: bool) -> None:
    """The record of a dropped group names its cause: without it, a resume would have the group played again.

    A group records its own drop before the run hears of it. What the run itself drops (stale, skipped, surplus) it
    records a little later, and at its end: only a run that `has_ended_well` has certainly done so.
    """
    trained = {item.group for record in files.records.values() for item in record.batch}
    for group, fate in sorted(account.fates.items()):
        result = files.settled.get(group)
        found = "no record" if result is None else f"{_PREFIX}{result.dropped.kind}" if result.dropped else "trainable"
        text = "the dropped group is on record as settled otherwise"
        breach = _breach_of(group, text, fate, found)
        if fate.startswith(_PREFIX) and (has_ended_well or _dropped_itself(account.results.get(group))):
            findings.expect(DROPPED, found == fate, breach)
        elif fate == BY_RECORD and group not in trained:
            findings.expect(DROPPED, found.startswith(_PREFIX), breach)


def _dropped_itself(told: GroupResult | None) -> bool:
    return told is not None and told.dropped is not None and told.dropped.kind is not CauseKind.SKIPPED


def check_steerings(history: RunHistory, files: RunFiles, findings: Findings) -> None:
    """Lines are numbered without gap, every one that the history shows as written is there as it was written, and there
    is no other."""
    if files.malformed_steering is not None:
        text = f"line {files.malformed_steering} of steering.jsonl cannot be read"
        findings.add(STEERINGS, _breach(text, "what was asked of the run", "something else"))
    for wanted, record in enumerate(files.steerings, start=1):
        breach = _breach(f"line {wanted} of steering.jsonl is another", f"number {wanted}", f"number {record.number}")
        if not findings.expect(STEERINGS, record.number == wanted, breach):
            break
    by_number = {record.number: record for record in files.steerings}
    for generation in history.generations:
        for record in generation.steerings:
            line = by_number.get(record.number)
            found = line.describe() if line else "no such line"
            text = f"number {record.number} of what was asked of the run is not on record as it was asked"
            breach = _breach(text, record.describe(), found).model_copy(update={"step": record.step})
            findings.expect(STEERINGS, line == record, breach)
    _check_unasked(history, files, findings)


def _check_unasked(history: RunHistory, files: RunFiles, findings: Findings) -> None:
    """Each line is one that the history knows of.

    Two kinds are not in it: what was asked before it begins, and that the run was resumed, which is written before the
    execution that goes on has a state to name it in.
    """
    known: dict[int, list[SteeringRecord]] = {}
    for generation in history.generations:
        start = generation.start
        carried = [*start.steerings, *start.unrecorded_steerings] if start is not None else []
        for record in (*carried, *generation.steerings, *generation.steerings_under_way):
            known.setdefault(record.number, []).append(record)
    has_resumed = any(generation.restores for generation in history.generations)
    before = _count_before(history)
    written = {record.number for generation in history.generations for record in generation.steerings}
    for line in files.steerings:
        if line.number in written:
            continue  # compared already
        asked = known.get(line.number, [])
        is_beginning = has_resumed and (line.action == "resumed" or line.action.startswith("forked from "))
        expected = asked[-1].describe() if asked else "no such line"
        text = f"number {line.number} on record was never asked of the run"
        breach = _breach(text, expected, line.describe()).model_copy(update={"step": line.step})
        is_old = not asked and line.number <= before
        findings.expect(STEERINGS, line in asked or is_old or is_beginning, breach)


def _count_before(history: RunHistory) -> int:
    """How much was asked before the history begins, as the first state of it tells."""
    first = history.generations[0]
    begins = not history.is_cut and (not first.restores or first.fork is not None)
    state = next((generation.start for generation in history.generations if generation.start is not None), None)
    return 0 if begins or state is None else state.num_steerings


def _breach(message: str, expected: str, found: str) -> Breach:
    return Breach(invariant=Invariant.STEPS, message=message, expected=expected, found=found)
