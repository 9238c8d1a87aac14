"""I5: how many groups may be open at once, by the settings in force when each was dispensed. Pure."""

from __future__ import annotations

from everroll.audit.account import Account
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.spec import RunSpec

BOUNDS = "no more groups are open than the run's settings allow"


class Bounds:
    """The limits in force. Those of one workflow task may be the ones before or after a change that it took in."""

    def __init__(self, spec: RunSpec) -> None:
        self._current = spec
        self._before: RunSpec | None = None
        self._changed_in = -1

    def begin(self, spec: RunSpec) -> None:
        """Another execution goes on by these settings."""
        self._current, self._before = spec, None

    def change(self, spec: RunSpec, task: int) -> None:
        self._before, self._current, self._changed_in = self._current, spec, task

    def check(self, account: Account, group: int, task: int, findings: Findings) -> None:
        """After a group was dispensed: (max_staleness + 1) x batch, those in excess, and the cap on those in flight."""
        specs = [self._current]
        if self._before is not None and task == self._changed_in:
            specs.append(self._before)
        limit = max(_count_open(spec) for spec in specs)
        _expect(group, "groups are open", limit, account.count_open(), findings)
        caps = [spec.rollout.max_groups_in_flight for spec in specs]
        known = [cap for cap in caps if cap]
        if known and len(known) == len(caps):
            _expect(group, "groups are in flight", max(known), len(account.in_flight), findings)


def _count_open(spec: RunSpec) -> int:
    rollout = spec.rollout
    return (rollout.max_staleness + 1) * rollout.groups_per_step + rollout.oversample_groups


def _expect(group: int, what: str, limit: int, found: int, findings: Findings) -> None:
    text = f"when the group was dispensed, more {what} than the settings allow"
    breach = Breach(
        invariant=Invariant.BOUNDS, group=group, message=text, expected=f"at most {limit}", found=str(found)
    )
    findings.expect(BOUNDS, found <= limit, breach)
