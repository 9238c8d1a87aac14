"""What became of an episode is a copy: the pending one, which may be played again, is never changed."""

from __future__ import annotations

import pytest

from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import EpisodeKey, EpisodeOutcome, EpisodeReport, GroupProgress
from tests.simulation import Simulation, abort
from workflows.group_results import build_group_result, merge_outcome, next_draw


def test_the_pending_episode_stays_as_it_is() -> None:
    """A1: what became of it is a copy."""
    key = EpisodeKey(run="r", group=0, member=1)
    pending = EpisodeOutcome(key=key, status=SampleStatus.PENDING)
    report = EpisodeReport(key=key, status=SampleStatus.COMPLETED, prompt_index=4, reward=1.0)
    outcome = merge_outcome(pending, report, abort(key))
    assert (outcome.status, outcome.cause is not None) == (SampleStatus.ABORTED, True)
    assert not outcome.is_trainable
    assert pending == EpisodeOutcome(key=key, status=SampleStatus.PENDING)
    with pytest.raises(ValueError, match="frozen"):
        pending.status = SampleStatus.ABORTED  # type: ignore[misc]


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (SampleStatus.ABORTED, CauseKind.TRANSPORT, 2),
        (SampleStatus.ABORTED, CauseKind.ENGINE, 2),
        (SampleStatus.ABORTED, CauseKind.ALL_TRUNCATED, 3),
        (SampleStatus.FAILED, CauseKind.AGENT, 3),
        (SampleStatus.FAILED, CauseKind.DEADLINE, 3),
    ],
)
def test_after_an_outage_the_same_tokens_are_drawn(status: SampleStatus, kind: CauseKind, expected: int) -> None:
    """I3: a run that had an outage ends with the weights of one that had none; an agent that failed may do better."""
    key = EpisodeKey(run="r", group=0, member=1, attempt=5)
    outcome = EpisodeOutcome(key=key, status=status, cause=Cause(kind=kind), draw=2)
    assert next_draw(outcome) == expected


def test_a_group_is_as_old_as_the_oldest_token_in_it() -> None:
    """I5: staleness is measured by one member that began early, whatever the others were sampled by."""
    outcomes = []
    for member, version in enumerate((7, 4, 6)):
        key = EpisodeKey(run="r", group=0, member=member)
        samples = Simulation(weight_version=version).build_collected(key).samples
        outcomes.append(EpisodeOutcome(key=key, status=SampleStatus.COMPLETED, reward=1.0, samples=samples))
    progress = GroupProgress(members=outcomes, started_at=0.0, remaining_seconds=1.0)
    assert build_group_result(0, progress, outcomes, None, None).min_weight_version == 4
