"""Which weights and checkpoints are still there: the newest must be, and the report says which are not. Pure."""

from __future__ import annotations

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles
from everroll.audit.report import Breach, Findings, Invariant
from everroll.audit.steps import WEIGHTS
from everroll.ranges import name_ranges


def check_kept(account: Account, files: RunFiles, findings: Findings) -> None:
    """Retention never lets go of the newest weights and the newest checkpoint: engines and a resume need them.

    A fork has the one checkpoint that it begins from, until it writes its own.
    """
    if not files.records:
        return
    own = [step for step in _list_checkpoints(account, files) if step > files.forked_at]
    held = {directory.step for directory in files.checkpoints}
    if own:
        breach = _breach(own[-1], "the newest checkpoint is gone", f"a directory, {own[-1]}", name_ranges(held))
        findings.expect(WEIGHTS, own[-1] in held, breach)
    else:
        breach = _breach(max(files.records), "the run has no checkpoint to go on from", "a directory", "none")
        findings.expect(WEIGHTS, bool(held), breach)
    gone = {
        "weights": files.records.keys() - {directory.step for directory in files.weights},
        "checkpoints": {*_list_checkpoints(account, files)} - held,
    }
    told = " and ".join(f"{what} of steps {name_ranges(steps)}" for what, steps in gone.items() if steps)
    if told:
        findings.note(
            f"{told} are not there any more (train.keep_weights and train.keep_checkpoints say how many stay): of "
            "these the records of their steps were looked at, and no files"
        )


def _list_checkpoints(account: Account, files: RunFiles) -> list[int]:
    """Steps that wrote a checkpoint: by the settings that they were taken with, or else by their record."""
    steps = []
    for step, record in sorted(files.records.items()):
        request = account.requests.get(step)
        by_settings = request is not None and step % request.train.checkpoint_every == 0
        if by_settings or record.checkpoint_sha256 is not None:
            steps.append(step)
    return steps


def _breach(step: int, message: str, expected: str, found: str) -> Breach:
    return Breach(invariant=Invariant.STEPS, step=step, message=message, expected=expected, found=found)
