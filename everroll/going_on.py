"""May a run go on so, or be forked so: what its settings and its directory tell.

The command line asks before it asks Temporal for anything, so that what cannot work is refused where it was typed; the
worker that takes the directory asks again, and its answer holds. Reads, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everroll.contracts.spec import RunSpec
from everroll.contracts.steering import (
    FIXED,
    FIXED_FOR_FORK,
    RefusedChangesError,
    apply_changes,
    describe_changes,
    find_differences,
)
from everroll.contracts.training import ForkOrigin, ResumeRequest
from everroll.failures import ConfigurationError
from everroll.ranges import name_ranges
from everroll.run_files import find_steps, is_complete

_NUM_STEPS = "num_steps"


def choose_spec(own: RunSpec, given: RunSpec, resume: ResumeRequest) -> RunSpec:
    """The settings that will hold: the run's own, or the file's, with the changes asked for; name and place are always
    as given.

    Raises:
        ConfigurationError: changes that cannot be made, a line for each.
    """
    spec = given if resume.from_file else own
    if resume.changes:
        try:
            spec, _ = apply_changes(spec, resume.changes)
        except RefusedChangesError as error:
            raise ConfigurationError(f"run {given.run.name} cannot go on so:\n{error}") from error
    place = {"name": given.run.name, "output_dir": given.run.output_dir}
    return spec.model_copy(update={"run": spec.run.model_copy(update=place)})


def check_resume(own: RunSpec, spec: RunSpec, step: int) -> None:
    """May a run that had the settings `own` and has done `step` steps go on by `spec`.

    Raises:
        ConfigurationError: it may not; the text says why and what to do.
    """
    run = spec.run
    if run.mode == "rollout":
        raise ConfigurationError(
            f"run {run.name} only played, and is not resumed: start another; what it stored stays of use"
        )
    fixed = find_differences(own, spec, FIXED)
    if fixed:
        raise ConfigurationError(
            f"run {run.name} cannot be resumed with these changes (a fork may have some of them):\n"
            f"{describe_changes(fixed)}"
        )
    # With as many steps as are done, a run that failed after its last one still ends properly.
    if run.num_steps < step or (run.num_steps == step and run.num_steps != own.run.num_steps):
        raise ConfigurationError(
            f"run {run.name} cannot go on with run.num_steps = {run.num_steps}: step {step} is done; give it at least "
            f"{step + 1}"
        )


def check_fork(own: RunSpec, spec: RunSpec, resume: ResumeRequest, origin: ForkOrigin) -> None:
    """May a fork of a run with the settings `own` have the settings `spec`.

    Raises:
        ConfigurationError: it may not; the text says why and what to do.
    """
    if spec.run.mode == "rollout":
        raise ConfigurationError(f"run {origin.run} only played, and has no steps to fork from: start another")
    fixed = find_differences(own, spec, FIXED_FOR_FORK)
    if fixed:
        raise ConfigurationError(f"a fork of {origin.run} cannot have these changes:\n{describe_changes(fixed)}")
    # With as many steps as its origin has taken, a fork only makes the weights of that step again: if somebody says so.
    is_told = resume.from_file or any(key.rpartition(".")[2] == _NUM_STEPS for key in resume.changes)
    if spec.run.num_steps < origin.step or (spec.run.num_steps == origin.step and not is_told):
        raise ConfigurationError(
            f"a fork from step {origin.step} of {origin.run} has nothing to do with run.num_steps = "
            f"{spec.run.num_steps}; give it more with --set num_steps=N"
        )


@dataclass(frozen=True)
class KeptSteps:
    """What a run directory holds of the steps that its run has taken."""

    latest: int
    """The newest applied step; 0 if there is none."""
    checkpoints: tuple[int, ...]
    """Steps with a complete checkpoint, newest first."""
    requests: frozenset[int]
    """Steps that can be trained again: their batches are stored."""


def read_kept_steps(run_dir: Path) -> KeptSteps:
    """Names and sizes are looked at, not contents."""
    checkpoints = reversed(find_steps(run_dir / "checkpoints"))
    return KeptSteps(
        latest=find_latest_step(run_dir),
        checkpoints=tuple(step for step, path in checkpoints if is_complete(path)),
        requests=frozenset(step for step, _ in find_steps(run_dir / "requests")),
    )


def find_latest_step(run_dir: Path) -> int:
    """The newest applied step; 0 if there is none."""
    return max((step for step, _ in find_steps(run_dir / "steps")), default=0)


def find_start(kept: KeptSteps, origin: ForkOrigin) -> int | None:
    """The newest complete checkpoint at or before a step from which stored batches lead to it. None for step 0 where
    that has no checkpoint any more: its weights are the model's.

    Raises:
        ConfigurationError: there is none; the text names the steps that can be had.
    """
    start = _start_of(origin.step, kept) if origin.step <= kept.latest else None
    if start is None and origin.step > 0:
        available = [step for step in range(kept.latest + 1) if step == 0 or _start_of(step, kept) is not None]
        checkpoints = ", ".join(map(str, sorted(kept.checkpoints))) or "none"
        raise ConfigurationError(
            f"run {origin.run} cannot be forked at step {origin.step}: it is at step {kept.latest}, and has "
            f"checkpoints of the steps {checkpoints}; with its stored batches these steps can be had: "
            f"{name_ranges(available)}"
        )
    return start


def _start_of(step: int, kept: KeptSteps) -> int | None:
    for start in kept.checkpoints:
        if start <= step and kept.requests.issuperset(range(start + 1, step + 1)):
            return start
    return None
