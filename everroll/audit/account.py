"""What an audit's fold of a run's history comes to. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from everroll.contracts.rollout import GroupRequest, GroupResult
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import TrainRequest, TrainResult


@dataclass
class Account:
    """What became of the run's groups and steps."""

    dispensed: dict[int, GroupRequest | None] = field(default_factory=dict)
    """None: known from the run directory alone."""
    planned: dict[int, int] = field(default_factory=dict)
    """Prompt by group, where a curriculum chooses."""
    in_flight: set[int] = field(default_factory=set)
    ready: dict[int, GroupResult] = field(default_factory=dict)
    most_open: int = 0
    """Most groups in flight, ready or in training at once, counted as each was dispensed."""
    fates: dict[int, str] = field(default_factory=dict)
    """Of settled groups: `trained`, or `dropped: <cause>`."""
    results: dict[int, GroupResult] = field(default_factory=dict)
    """What the run was told of each group."""
    trained_at: dict[int, int] = field(default_factory=dict)
    """Group to step."""
    in_training: list[int] = field(default_factory=list)
    requests: dict[int, TrainRequest] = field(default_factory=dict)
    asked_in_vain: dict[int, list[TrainRequest]] = field(default_factory=dict)
    """Requests, by step, of executions that ended before the step was applied."""
    specs: list[RunSpec] = field(default_factory=list)
    """What run.json may hold: the settings that were last known to be written there, and all that held since."""
    applied: dict[int, TrainResult] = field(default_factory=dict)
    version: int = 0
    """Published, and taken for the run's version."""
    recorded: set[int] = field(default_factory=set)
    """Groups whose result is known from the run directory: written before the group's workflow ended."""
    by_record: int = 0
    """Steps up to this one were applied by the run directory's records, whatever the history tells."""

    def count_open(self) -> int:
        """Groups in flight, ready or in training."""
        return len(self.in_flight) + len(self.ready) + len(self.in_training)

    @property
    def num_steps(self) -> int:
        """Steps applied."""
        return max([self.by_record, *self.applied])
