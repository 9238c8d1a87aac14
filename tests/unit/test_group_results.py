"""What became of an episode is a copy: the pending one, which may be played again, is never changed."""

from __future__ import annotations

import pytest

from everroll.contracts.outcomes import SampleStatus
from everroll.contracts.rollout import EpisodeKey, EpisodeOutcome, EpisodeReport
from tests.simulation import abort
from workflows.group_results import merge_outcome


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
