"""Errors of the trainer. All but the last are terminal for the call that raised them; none leaves a step half applied.

TrainingError               (everroll.contracts.outcomes)
  TrainingDataError         the batch is not fit to train on; names run, group, member and sample
  CheckpointError           no complete checkpoint to start from, or one cannot be read
  StepOrderError            the step does not follow on from what the run directory holds
  BusyError                 (everroll.contracts.outcomes)
    RunInUseError           another process holds the run directory; the only one where a retry can help
"""

from __future__ import annotations

from everroll.contracts.outcomes import BusyError, TrainingError


class TrainingDataError(TrainingError):
    """A batch that must not be trained; the message names run, group, member and sample."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, torn or of another format."""


class StepOrderError(TrainingError):
    """The step asked for does not follow on from the run directory, or was applied with another batch."""


class RunInUseError(BusyError):
    """Another trainer process holds this run directory."""
