"""A fork's run directory: that of another run as of one of its steps, by hard links; nothing of the other changes."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from activities.rebuilding import find_cursor, find_trained
from activities.restoring import read_steps
from everroll.contracts.rollout import DatasetRef
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import ForkOrigin, ResumeRequest
from everroll.going_on import check_fork, find_start, read_kept_steps
from everroll.run_files import is_complete
from everroll.run_record import RunRecord, RunRecordDirectory, check_dataset
from trainer.durable import link_file
from trainer.rundir import AppliedStep, RunDirectory

_ONCE_A_RUN = ("model_files", "base_model")


@dataclass(frozen=True)
class Branch:
    """What a fork takes over."""

    record: RunRecord
    """Of the run that it comes from."""
    checkpoint: int | None
    """Where the trainer starts from; the stored batches from there to the step are trained again. None: it begins with
    the model, as for a new run."""


def plan_fork(origin: ForkOrigin, record: RunRecord, spec: RunSpec, resume: ResumeRequest) -> Branch:
    """
    Raises:
        ConfigurationError: no such step, or a setting that a fork must keep.
    """
    check_fork(record.spec, spec, resume, origin)
    return Branch(record, find_start(read_kept_steps(Path(origin.run_dir)), origin))


def write_fork(origin: ForkOrigin, branch: Branch, spec: RunSpec, dataset: DatasetRef, execution_id: str) -> None:
    """Make the fork's directory; it appears whole or not at all.

    Raises:
        ConfigurationError: the data set is another one.
        OSError: something could not be linked or written; a live trainer may just have removed it.
    """
    check_dataset(branch.record.dataset, dataset)
    final = Path(spec.run.output_dir, spec.run.name)
    temporary = final.parent / f".tmp-fork-{spec.run.name}-{uuid.uuid4().hex}"
    temporary.mkdir(parents=True)
    try:
        _copy_steps(RunDirectory(Path(origin.run_dir)), RunDirectory(temporary), origin.step, branch.checkpoint)
        _copy_settled(Path(origin.run_dir), temporary, origin.step)
        _copy_plans(Path(origin.run_dir), temporary, origin.step)
        RunRecordDirectory(temporary).write(
            RunRecord(spec=spec, dataset=dataset, executions=[execution_id], forked_from=origin)
        )
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _copy_steps(source: RunDirectory, target: RunDirectory, step: int, checkpoint: int | None) -> None:
    """The trainer's part, of all steps up to one."""
    for name in ("checkpoints", "weights", "requests", "steps"):
        (target.root / name).mkdir()
    if checkpoint is None:
        return
    for name in _ONCE_A_RUN:
        if (source.root / name).is_dir():
            _link_directory(source.root / name, target.root / name)
    _link_directory(source.checkpoint(checkpoint), target.checkpoint(checkpoint))
    if is_complete(source.weights(step)):
        _link_directory(source.weights(step), target.weights(step))
    for number in range(1, step + 1):
        record, request = source.read_record(number), source.read_request(number)
        if record is not None:
            target.write_record(record)
        if request is not None:
            target.write_request(request)
    if source.metrics_path.exists():
        lines = [line for line in source.metrics_path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        target.metrics_path.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] <= step))


def _copy_settled(source: Path, target: Path, step: int) -> None:
    """Groups that were trained or dropped by then. What was ready or in flight is played again by the fork."""
    steps = read_steps(source, step)
    wanted = find_settled(steps)
    directory = RunRecordDirectory(target)
    for group, result in RunRecordDirectory(source).read_settled().items():
        if group in wanted:
            directory.write_settled(result)


def _copy_plans(source: Path, target: Path, step: int) -> None:
    """What a curriculum had chosen by then: the blocks of which a group had started."""
    cursor, directory = find_cursor(read_steps(source, step)), RunRecordDirectory(target)
    for block in RunRecordDirectory(source).read_plans():
        if block.first_group < cursor:
            directory.append_plan(block)


def find_settled(steps: dict[int, AppliedStep]) -> set[int]:
    """Groups that were settled when the newest of these steps was handed over, or were settled by them."""
    dropped = {group for record in steps.values() if record.mark for group in record.mark.dropped}
    return {*find_trained(steps), *dropped} & set(range(find_cursor(steps)))


def _link_directory(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        link_file(path, target / path.name)
