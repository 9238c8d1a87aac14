"""Overlap's options in the ledger alone: what may start, who is a straggler, what is played again."""

from __future__ import annotations

from everroll.contracts.names import ATTEMPTS_PER_RESUME
from everroll.contracts.outcomes import CauseKind
from everroll.contracts.rollout import BlobRef, GroupResult
from everroll.contracts.training import RunState, Weights
from tests.simulation import build_spec
from workflows.ledger import MAX_STALE_REFILLS, Ledger


def build_ledger(state: RunState, num_steps: int = 5, **rollout: object) -> Ledger:
    return Ledger(build_spec("r", "q", run={"num_steps": num_steps}, rollout=rollout), state)


def ready(group: int, version: int = 0) -> GroupResult:
    blob = BlobRef(uri="x", sha256="0", num_bytes=1)
    return GroupResult(group=group, manifest=blob, mean_reward=0.5, min_weight_version=version)


def admit_all(ledger: Ledger) -> list[int]:
    admitted = []
    while ledger.can_admit():
        admitted.append(ledger.admit())
    return admitted


def test_oversampling_ends_with_the_gathering_of_a_batch() -> None:
    state = RunState(weights=Weights(version=0, path="w"))
    ledger = build_ledger(state, groups_per_step=2, oversample_groups=3)
    assert admit_all(ledger) == [0, 1, 2, 3, 4]
    for group in (1, 3):
        ledger.settle(ready(group))
    assert [result.group for result in ledger.take_batch()] == [1, 3]
    for group in (0, 2, 4):
        ledger.settle(ready(group))
        state.ready.clear()
        assert not ledger.can_admit(), "nothing more starts under weights that are about to be old"


def test_nothing_is_started_in_excess_of_a_run_that_has_ended() -> None:
    state = RunState(weights=Weights(version=5, path="w"), step=5)
    assert not build_ledger(state, num_steps=5, oversample_groups=3).can_admit()


def test_stragglers_are_of_the_next_batch_only() -> None:
    state = RunState(weights=Weights(version=3, path="w"), in_flight={4: 3, 6: 3, 7: 3, 8: 3}, ready=[ready(5, 3)])
    stragglers = {"policy": "drop", "after_share": 0.5}
    ledger = build_ledger(state, groups_per_step=2, max_staleness=2, stragglers=stragglers)
    assert ledger.has_share()
    assert ledger.find_stragglers() == [4], "6 to 8 are for later steps"
    state.ready.clear()
    assert not ledger.has_share()
    assert build_ledger(state, groups_per_step=2, oversample_groups=1).find_stragglers() == [4, 6, 7]


def test_a_stale_group_comes_before_new_ones_and_keeps_its_prompt() -> None:
    state = RunState(
        weights=Weights(version=2, path="w"), step=2, in_flight={3: 1, 4: 2}, next_group=5, planned={3: 77, 4: 78}
    )
    ledger = build_ledger(state, on_stale="refill", max_refills=3)
    ledger.settle(ready(3, 1))
    assert state.dropped_groups == {}
    assert state.planned[3] == 77
    assert ledger.find_first_attempt(3) == 4
    assert ledger.find_first_attempt(4) == 0
    assert ledger.can_admit()
    assert ledger.admit() == 3
    assert state.in_flight == {3: 2, 4: 2}
    for time in range(2, MAX_STALE_REFILLS + 1):
        ledger.settle(ready(3, 1))
        assert ledger.find_first_attempt(3) == 4 * time
        assert ledger.admit() == 3
    ledger.settle(ready(3, 1))
    assert state.dropped_groups == {"stale": 1}
    assert state.planned == {4: 78}
    assert state.resampled == {}


def test_attempts_of_a_stale_group_stay_apart_from_those_after_a_resume() -> None:
    state = RunState(weights=Weights(version=1, path="w"), step=1, in_flight={0: 0}, next_group=1, num_resumes=2)
    ledger = build_ledger(state, on_stale="refill", max_refills=999)
    assert ledger.find_first_attempt(0) == 2 * ATTEMPTS_PER_RESUME
    for _ in range(MAX_STALE_REFILLS + 1):
        if 0 in state.in_flight:
            ledger.settle(ready(0, 0))
        if state.replay:
            last = ledger.find_first_attempt(ledger.admit()) + 999
            assert last < 3 * ATTEMPTS_PER_RESUME


def test_surplus_is_settled_and_is_no_sign_of_trouble() -> None:
    state = RunState(weights=Weights(version=1, path="w"), ready=[ready(7, 1)], replay=[3], next_group=8)
    ledger = build_ledger(state)
    ledger.drop_surplus()
    assert (state.ready, state.replay) == ([], [])
    assert state.dropped_groups == {CauseKind.SURPLUS.value: 2}
    assert state.consecutive_dropped == 0
    assert sorted(result.group for result in state.unrecorded) == [3, 7]
