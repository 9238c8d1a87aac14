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

SETTLED = "trained groups are on record as settled with what was trained"
DROPPED = "dropped groups are on record as dropped for their cause"
_PREFIX = "dropped: "
STEERINGS = "what was asked of the run is on record, in order"


def check_settled(files: RunFiles, trained: Mapping[int, BlobRef], findings: Findings) -> None:
    """The record of a trained group names the manifest that was trained; no record is of another group."""
    for number, result in files.settled.items():
        found = "a record that cannot be read" if result is None else f"group {result.group}"
        text = "the record of how the group was settled is none of it"
        breach = Breach(invariant=Invariant.SETTLED_ONCE, group=number, message=text)
        breach = breach.model_copy(update={"expected": f"group {number}", "found": found})
        findings.expect(SETTLED, result is not None and result.group == number, breach)
    for group, manifest in sorted(trained.items()):
        result = files.settled.get(group)
        known = result.manifest if result else None
        found = "no record" if result is None else known.uri if known else f"dropped: {result.dropped}"
        text = "the trained group is on record as settled otherwise"
        breach = Breach(invariant=Invariant.SETTLED_ONCE, group=group, message=text, expected=manifest.uri, found=found)
        findings.expect(SETTLED, known == manifest, breach)


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
        breach = Breach(invariant=Invariant.SETTLED_ONCE, group=group, message=text, expected=fate, found=found)
        if fate.startswith(_PREFIX) and (has_ended_well or _dropped_itself(account.results.get(group))):
            findings.expect(DROPPED, found == fate, breach)
        elif fate == BY_RECORD and group not in trained:
            findings.expect(DROPPED, found.startswith(_PREFIX), breach)


def _dropped_itself(told: GroupResult | None) -> bool:
    return told is not None and told.dropped is not None and told.dropped.kind is not CauseKind.SKIPPED


def check_steerings(history: RunHistory, files: RunFiles, findings: Findings) -> None:
    """Lines are numbered without gap, and every one that the history shows as written is there as it was written."""
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


def _breach(message: str, expected: str, found: str) -> Breach:
    return Breach(invariant=Invariant.STEPS, message=message, expected=expected, found=found)
