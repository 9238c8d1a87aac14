"""A run that was resumed: what its new execution took from the run directory, against what the history told before."""

from __future__ import annotations

from everroll.audit.account import Account
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.training import RunState

RESTORED = "state restored from the run directory"
BY_RECORD = "settled before a resume, by record"
_I1 = Invariant.SETTLED_ONCE


def adopt_restored(
    account: Account, state: RunState, ended_last: list[int], findings: Findings, *, plays: bool = True
) -> set[int]:
    """Go on from the state that a resumed run started with; returns the groups that it is to play again.

    What an execution settled after its last event in the history (it was terminated, or its server was lost) is known
    from the records alone. What the history does tell must not be undone: a group that was trained or dropped is not
    open again, and the cursor does not go back. A run that `plays` nothing has trained groups that are another run's.
    """
    _settle_steps(account, state)
    open_again = {*state.in_flight, *state.replay, *(result.group for result in state.ready)}
    for group in ended_last:
        account.fates.pop(group, None)  # the run ended them with itself
    for group in sorted(open_again & set(account.fates)):
        fate = account.fates.pop(group)
        text = "a group that was settled is open again after a resume"
        findings.add(RESTORED, Breach(invariant=_I1, group=group, message=text, expected=fate, found="open"))
    cursor = len(account.dispensed)
    breach = Breach(
        invariant=_I1,
        message="the cursor went back with a resume",
        expected=f"group {cursor} or later",
        found=f"group {state.next_group}",
    )
    findings.expect(RESTORED, state.next_group >= cursor, breach)
    account.in_flight = set(state.in_flight)
    account.ready = {result.group: result for result in state.ready}
    account.recorded |= set(account.ready) - set(account.results)
    account.results = {**account.ready, **account.results}
    account.in_training = []
    for group in range(state.next_group):
        account.dispensed.setdefault(group, None)
        if group not in open_again:
            account.fates.setdefault(group, BY_RECORD)
    if plays:
        _compare_counts(account, state, findings)
    return set(state.replay)


def _settle_steps(account: Account, state: RunState) -> None:
    """A step whose request is in the history and whose record is on disk was applied, whoever heard of it."""
    for step, request in list(account.requests.items()):
        groups = [item.group for item in request.batch]
        if step > state.step:
            account.asked_in_vain.setdefault(step, []).append(account.requests.pop(step))
            for group in groups:
                account.trained_at.pop(group, None)
        elif step not in account.applied:
            account.fates.update(dict.fromkeys(groups, "trained"))
    account.by_record = state.step
    account.version = max(account.version, state.step)


def _compare_counts(account: Account, state: RunState, findings: Findings) -> None:
    """Every group is in one place, by the state's own counts."""
    num_settled = state.trained_groups + sum(state.dropped_groups.values())
    num_open = len(state.in_flight) + len(state.replay) + len(state.ready)
    breach = Breach(
        invariant=_I1,
        message="the restored state does not account for every group once",
        expected=f"{state.next_group} groups",
        found=f"{num_settled} settled and {num_open} open",
    )
    findings.expect(RESTORED, num_settled + num_open == state.next_group, breach)
