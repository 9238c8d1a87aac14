"""The state that is made from a run directory: every group in one place, whatever was written before the end."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.rebuilding import build_state
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import BlobRef, DatasetRef, GroupResult
from everroll.contracts.training import GroupBatchItem, LedgerMark, TrainResult, Weights
from trainer.rundir import AppliedStep

BLOB = BlobRef(uri="x", sha256="0", num_bytes=1)
DATASET = DatasetRef(path="p", fingerprint="f", num_prompts=10, seed=0, shuffle=False)
KINDS = ("trained", "ready", "dropped", "playing", "lost")


def build_step(step: int, groups: list[int], mark: LedgerMark | None) -> AppliedStep:
    result = TrainResult(step=step, weights=Weights(version=step, path="w"), metrics={"loss": 0.5})
    batch = [GroupBatchItem(group=group, manifest=BLOB) for group in groups]
    return AppliedStep(batch=batch, weights_sha256={}, result=result, mark=mark)


def stored(group: int) -> GroupResult:
    return GroupResult(group=group, manifest=BLOB, mean_reward=0.5, num_episodes=2, min_weight_version=0)


def dropped(group: int) -> GroupResult:
    return GroupResult(group=group, dropped=Cause(kind=CauseKind.AGENT, message="raised"), num_episodes=3)


@settings(deadline=None)
@given(fates=st.lists(st.sampled_from(KINDS), max_size=30), batch=st.integers(1, 4), ahead=st.integers(0, 3))
def test_every_group_is_in_one_place(fates: list[str], batch: int, ahead: int) -> None:
    at = {kind: [group for group, fate in enumerate(fates) if fate == kind] for kind in KINDS}
    chunks = [at["trained"][start : start + batch] for start in range(0, len(at["trained"]), batch)]
    steps = {step: build_step(step, groups, None) for step, groups in enumerate(chunks, start=1)}
    settled = {group: stored(group) for group in (*at["trained"], *at["ready"])}
    settled |= {group: dropped(group) for group in at["dropped"]}
    # A group that a terminated run left playing may have been settled before it was looked for.
    in_flight = [*at["playing"], *at["ready"][:1]]
    state = build_state(
        steps, settled, dataset=DATASET, num_dispensed=len(fates) + ahead, in_flight=in_flight, num_resumes=1
    )
    assert state.step == len(chunks)
    assert state.trained_groups == len(at["trained"])
    assert [result.group for result in state.ready] == at["ready"]
    assert state.dropped_groups == ({"agent": len(at["dropped"])} if at["dropped"] else {})
    assert sorted(state.in_flight) == at["playing"]
    assert state.next_group == len(fates) + ahead
    assert state.replay == sorted([*at["lost"], *range(len(fates), len(fates) + ahead)])
    assert state.num_episodes == 2 * (len(at["trained"]) + len(at["ready"])) + 3 * len(at["dropped"])
    num_open = len(state.ready) + len(state.in_flight) + len(state.replay)
    assert state.trained_groups + sum(state.dropped_groups.values()) + num_open == state.next_group


def test_marks_are_the_cursor_of_their_step() -> None:
    """Known to have started by the mark, dropped since it: the next mark will name that one."""
    steps = {1: build_step(1, [0, 2], LedgerMark(next_group=6, dropped=[1]))}
    settled = {0: stored(0), 1: dropped(1), 2: stored(2), 3: dropped(3), 4: stored(4)}
    state = build_state(steps, settled, dataset=DATASET)
    assert state.next_group == 6
    assert state.replay == [5]
    assert state.unmarked_dropped == [3]
    (record,) = state.recent_steps
    assert (record.groups, record.mean_reward, record.dropped) == ([0, 2], 0.5, {"agent": 1})
    assert state.planned_until == 5


def test_a_group_that_was_trained_and_found_stale_later_is_trained() -> None:
    """The step's record is what counts, in whatever order the two were written."""
    state = build_state({1: build_step(1, [0], None)}, {0: dropped(0)}, dataset=DATASET)
    assert (state.trained_groups, state.dropped_groups, state.ready) == (1, {}, [])


def test_groups_believe_what_a_later_execution_tells_them_whatever_the_clock_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that were told by an earlier version, which began with the seconds since 1970."""
    numbers = [int(time.time())]
    for num_resumes in (1, 2):
        monkeypatch.setattr(time, "time", lambda: 0.0)
        numbers.append(build_state({}, {}, dataset=DATASET, num_resumes=num_resumes).hold_number)
    assert numbers[0] < numbers[1] < numbers[2] - 1000
