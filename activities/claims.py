"""Who may use a run directory, and with which settings: a run that begins, one that goes on, or a fork of another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from activities.forking import Branch, plan_fork, write_fork
from everroll.contracts.rollout import DatasetRef
from everroll.contracts.spec import RunSpec
from everroll.contracts.steering import Change, SteeringRecord, find_differences
from everroll.contracts.training import ForkOrigin, PrepareRunRequest, ResumeRequest
from everroll.failures import ConfigurationError
from everroll.going_on import check_resume, choose_spec, find_latest_step
from everroll.run_record import RunRecord, RunRecordDirectory, check_dataset
from trainer.rundir import RunDirectory

_ALL = tuple(RunSpec.model_fields)


@dataclass(frozen=True)
class Claim:
    """What a run will work with, before its services and data have been looked at."""

    directory: RunRecordDirectory
    spec: RunSpec
    record: RunRecord | None = None
    """What lies in the directory."""
    branch: Branch | None = None
    """What a fork comes from."""


def plan_claim(request: PrepareRunRequest) -> Claim:
    """Find the settings that will hold. Changes nothing.

    Raises:
        ConfigurationError: the directory is another run's, or holds none to resume, or a setting must not change.
    """
    given = request.spec
    directory = RunRecordDirectory(Path(given.run.output_dir, given.run.name))
    record = directory.read()
    if record is not None and request.execution_id == record.executions[-1]:
        return Claim(directory, record.spec, record)  # an earlier attempt got so far
    if request.fork is None and request.resume is not None:
        if record is None:
            raise ConfigurationError(f"{directory.root} holds no run to resume: there is no run.json")
        spec = choose_spec(record.spec, given, request.resume)
        check_resume(record.spec, spec, find_latest_step(directory.root))
        return Claim(directory, spec, record)
    if record is not None:
        raise ConfigurationError(
            f"{directory.root} holds an earlier run of this name; go on with it by `everroll resume {given.run.name}`, "
            "or choose another run.name"
        )
    if request.fork is None:
        return Claim(directory, given)
    source = RunRecordDirectory(Path(request.fork.run_dir)).read()
    if source is None:
        raise ConfigurationError(f"{request.fork.run_dir} holds no run to fork: there is no run.json")
    resume = request.resume or ResumeRequest()
    spec = choose_spec(source.spec, given, resume)
    return Claim(directory, spec, branch=plan_fork(request.fork, source, spec, resume))


def take_claim(claim: Claim, dataset: DatasetRef, request: PrepareRunRequest) -> None:
    """Write who holds the directory, and what changes with that. Harmless to repeat.

    Raises:
        ConfigurationError: the data set is not that which the run began with.
    """
    record, directory = claim.record, claim.directory
    resume = request.resume or ResumeRequest()
    if claim.branch is not None and request.fork is not None:
        write_fork(request.fork, claim.branch, claim.spec, dataset, request.execution_id)
        _note(directory, resume, claim.branch.record.spec, claim.spec, request.fork)
    elif record is None:
        directory.write(RunRecord(spec=claim.spec, dataset=dataset, executions=[request.execution_id]))
    else:
        check_dataset(record.dataset, dataset)
        if request.execution_id == record.executions[-1]:
            return
        _note(directory, resume, record.spec, claim.spec, None)
        update = {
            "spec": claim.spec,
            "dataset": dataset,
            "executions": [*record.executions, request.execution_id],
            "num_resumes": record.num_resumes + 1,
        }
        directory.write(record.model_copy(update=update))


def _note(
    directory: RunRecordDirectory, resume: ResumeRequest, old: RunSpec, new: RunSpec, fork: ForkOrigin | None
) -> None:
    """Put the new beginning among what was asked of the run."""
    known = directory.read_steerings()
    changes: dict[str, Change] = find_differences(old, new, _ALL)
    record = SteeringRecord(
        number=known[-1].number + 1 if known else 1,
        at=time.time(),
        action=f"forked from {fork.run} at step {fork.step}" if fork else "resumed",
        by=resume.by,
        reason=resume.reason,
        step=RunDirectory(directory.root).latest_applied(),
        changes=changes,
    )
    directory.append_steerings([record])
