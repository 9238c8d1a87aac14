"""`run.json`, from which a resume takes the run's settings and a fork its origin, against the history. Pure."""

from __future__ import annotations

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles, RunHistory
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.spec import RunSpec
from everroll.contracts.steering import find_differences

SETTINGS = "run.json holds the run's settings and origin"
_ALL = tuple(RunSpec.model_fields)


def check_run_record(history: RunHistory, account: Account, files: RunFiles, findings: Findings) -> None:
    """Settings are those that the run had last. Of a run that did not end well: any that it had since it last wrote
    them down. An open run may have changed them since its history was read, and one that ended while it was being
    resumed, before its history tells which it chose.
    """
    if history.dataset is None:
        return  # it ended before it made its directory its own
    record = files.run_record
    breach = _breach("run.json is missing or cannot be read", "the run's record", files.run_trouble or "none")
    if not findings.expect(SETTINGS, record is not None, breach) or record is None:
        return
    _check_origin(history, files, findings)
    if history.state == "running" or history.generations[-1].restores:
        return
    allowed = account.specs[-1:] if history.state == "completed" else account.specs
    if not allowed:
        return
    differences = [find_differences(spec, record.spec, _ALL) for spec in allowed]
    nearest = min(reversed(differences), key=len)
    name = next(iter(nearest), None)
    breach = _breach("run.json holds other settings than the run had", "", "")
    if name is not None:
        change = nearest[name]
        breach = _breach(breach.message, f"{name} = {change.old!r}", f"{name} = {change.new!r}")
    findings.expect(SETTINGS, name is None, breach)


def _check_origin(history: RunHistory, files: RunFiles, findings: Findings) -> None:
    """Where a fork comes from. Unknown where the history does not begin with the run."""
    first = history.generations[0]
    if history.is_cut or (first.restores and first.fork is None) or files.run_record is None:
        return
    wanted, found = first.fork, files.run_record.forked_from
    breach = _breach("run.json tells of another origin than the history", f"{wanted}", f"{found}")
    findings.expect(SETTINGS, wanted == found, breach)


def _breach(message: str, expected: str, found: str) -> Breach:
    return Breach(invariant=Invariant.STEPS, message=message, expected=expected, found=found)
