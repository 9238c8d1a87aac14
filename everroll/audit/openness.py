"""An open run's directory goes on after its history was read: what it holds of later steps is left out. Pure."""

from __future__ import annotations

import dataclasses

from everroll.audit.account import Account
from everroll.audit.evidence import RunFiles


def leave_out_later(files: RunFiles, account: Account) -> RunFiles:
    """The files as far as the history knows of the steps that wrote them."""
    last = max([account.by_record, *account.requests])
    malformed_line = files.malformed_line
    return dataclasses.replace(
        files,
        records={step: record for step, record in files.records.items() if step <= last},
        unreadable={step: text for step, text in files.unreadable.items() if step <= last},
        metric_lines=[line for line in files.metric_lines if line[0] <= last],
        malformed_line=malformed_line if malformed_line is not None and malformed_line <= last else None,
        weights=[directory for directory in files.weights if directory.step <= last],
        checkpoints=[directory for directory in files.checkpoints if directory.step <= last],
    )
