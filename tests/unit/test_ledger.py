"""The ledger's promises, over random settlings: I1 (every prompt settles once), I3 (order) and I5 (bounds)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from everroll.contracts.health import AbortSummary, EpisodesReport
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.rollout import BlobRef, GroupResult
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import RunState, TrainResult, Weights
from workflows.ledger import Ledger

BLOB = BlobRef(uri="x", sha256="0", num_bytes=1)


def build_spec(batch: int, num_steps: int, max_staleness: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"name": "r", "num_steps": num_steps},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rollout": {
                "agent": {"function": "a:b"},
                "groups_per_step": batch,
                "episodes_per_group": 2,
                "max_staleness": max_staleness,
            },
        }
    )


def ready(group: int, version: int) -> GroupResult:
    return GroupResult(group=group, manifest=BLOB, mean_reward=0.5, min_weight_version=version, num_episodes=2)


def dropped(group: int) -> GroupResult:
    return GroupResult(group=group, dropped=Cause(kind=CauseKind.AGENT, message="raised"))


def finish(ledger: Ledger, state: RunState, batch: list[GroupResult]) -> None:
    version = state.step + 1
    trained = TrainResult(step=version, weights=Weights(version=version, path="w"), metrics={"loss": 0.1})
    ledger.finish_step(batch, trained, rollout_seconds=1, train_seconds=1, publish_seconds=1)


@settings(deadline=None)  # a deadline measures the machine
@given(batch=st.integers(1, 4), num_steps=st.integers(1, 5), max_staleness=st.integers(0, 3), data=st.data())
def test_random_runs(batch: int, num_steps: int, max_staleness: int, data: st.DataObject) -> None:
    spec = build_spec(batch, num_steps, max_staleness)
    state = RunState(weights=Weights(version=0, path="w0"))
    ledger = Ledger(spec, state)
    dispensed: list[int] = []
    trained: list[int] = []
    in_training: list[GroupResult] | None = None
    for _ in range(500):
        while ledger.can_admit():
            dispensed.append(ledger.admit())
            held = len(in_training or [])
            assert len(state.in_flight) + len(state.ready) + held <= (max_staleness + 1) * batch
            if max_staleness == 0:
                assert in_training is None, "a synchronous run starts no group before the new weights are out"
        if state.step == num_steps:
            break
        if in_training is None and ledger.has_batch():
            in_training = ledger.take_batch()
            groups = [result.group for result in in_training]
            assert groups == sorted(groups)
            assert all(state.step - (r.min_weight_version or 0) <= max_staleness for r in in_training)
            continue
        if in_training is not None and (not state.in_flight or data.draw(st.booleans(), label="finish the step")):
            trained += [result.group for result in in_training]
            finish(ledger, state, in_training)
            in_training = None
            # Continue-as-new at any step boundary loses nothing.
            state = RunState.model_validate_json(state.model_dump_json())
            ledger = Ledger(spec, state)
            continue
        if not state.in_flight:
            continue
        group = data.draw(st.sampled_from(sorted(state.in_flight)), label="group that ends")
        if sum(state.dropped_groups.values()) < 10 and data.draw(st.booleans(), label="drop"):
            ledger.settle(dropped(group))
        else:
            ledger.settle(ready(group, state.in_flight[group]))
    assert state.step == num_steps
    assert dispensed == list(range(len(dispensed)))
    assert len(trained) == len(set(trained)) == num_steps * batch
    num_dropped = sum(state.dropped_groups.values())
    assert len(dispensed) == len(trained) + num_dropped + len(state.in_flight) + len(state.ready)


def test_a_stale_group_is_dropped_and_replaced() -> None:
    state = RunState(weights=Weights(version=3, path="w"), step=3, in_flight={7: 1, 8: 3}, next_group=9)
    ledger = Ledger(build_spec(batch=2, num_steps=9, max_staleness=1), state)
    ledger.settle(ready(7, 1))
    ledger.settle(ready(8, 3))
    assert not ledger.has_batch()
    assert state.dropped_groups == {"stale": 1}
    assert [result.group for result in state.ready] == [8]
    assert ledger.can_admit()


def test_counts_by_cause_reach_the_step_record() -> None:
    state = RunState(weights=Weights(version=0, path="w"), in_flight={0: 0, 1: 0}, next_group=2)
    ledger = Ledger(build_spec(batch=1, num_steps=2, max_staleness=1), state)
    ledger.note_report(EpisodesReport(group=0, num_collected=2, failed={"agent": 2}))
    ledger.settle(dropped(0))
    assert state.consecutive_dropped == 1
    lost = Cause(kind=CauseKind.TRANSPORT, error="ReadError", server="http://x")
    aborts = [AbortSummary(cause=lost, count=1, first_at=1.0, last_at=1.0)]
    ledger.note_report(EpisodesReport(group=1, num_collected=2, aborts=aborts))
    assert state.last_cause == lost
    ledger.settle(ready(1, 0))
    assert state.consecutive_dropped == 0
    assert ledger.has_batch()
    finish(ledger, state, ledger.take_batch())
    record = state.recent_steps[-1]
    assert record.groups == [1]
    assert record.dropped == {"agent": 1}
    assert record.unusable == {"agent": 2, "transport": 1}
    assert state.pending_dropped == {}
    assert record.metrics == {"loss": 0.1}


def test_no_run_has_more_groups_in_flight_than_a_workflow_may_have_children() -> None:
    """Temporal's limit is 2,000; past it the run's workflow task is refused for ever."""
    spec = build_spec(batch=512, num_steps=100, max_staleness=3)
    state = RunState(weights=Weights(version=0, path="w0"))
    ledger = Ledger(spec, state)
    while ledger.can_admit():
        ledger.admit()
    assert len(state.in_flight) == 1900
