"""Errors of the trainer. All but the last two end the step for good; none leaves it half applied.

TrainingError               (everroll.contracts.outcomes)
  TrainingDataError         the batch is not fit to train on; names run, group, member and sample
  CheckpointError           no complete checkpoint to start from, or one cannot be read
  ReplayDifferenceError     a stored batch trained again gave other weights, and `on_replay_difference` is `fail`
  StepOrderError            the step does not follow on from what the run directory holds
  BusyError                 (everroll.contracts.outcomes)
    RunInUseError           another process holds the run directory; a retry can help
    LostRankError           one of the trainer's own processes was lost; a retry finds new ones
"""

from __future__ import annotations

from everroll.contracts.outcomes import BusyError, TrainingError


class TrainingDataError(TrainingError):
    """A batch that must not be trained; the message names run, group, member and sample."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, torn or of another format."""


class StepOrderError(TrainingError):
    """The step asked for does not follow on from the run directory, or was applied with another batch."""


class ReplayDifferenceError(TrainingError):
    """A stored batch that was trained again after a lost process gave other weights than the first time."""


class RunInUseError(BusyError):
    """Another trainer process holds this run directory."""


class LostRankError(BusyError):
    """A process of this trainer was lost or went silent; the others end too, and start again from the checkpoint."""
