"""The trainer as a worker holds it: model and optimizer in memory, every step applied exactly once.

A step is applied when its record is on disk. Asked for it again, the trainer answers from the record. A process that
was lost is replaced by one that loads the newest complete checkpoint and trains the stored requests since then again,
which on the same CPU gives the same weights bit for bit; no rollout is needed for it. The weights' hashes are compared
with those recorded the first time.

With several processes this is rank 0: it decides and writes, and the others do as it says (`trainer.distributed`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from everroll.contracts.spec import TrainSection
from everroll.contracts.training import PrepareTrainerRequest, TrainRequest, TrainResult, Weights
from everroll.run_files import Manifest, is_complete
from trainer.checkpoint import (
    TrainerState,
    find_checkpoint,
    save_base_model,
    save_checkpoint,
    save_model_files,
    save_weights,
)
from trainer.distributed.commands import Apply, Begin, Collect, Forget, LoadBatch, LoadCheckpoint, SaveOptimizer
from trainer.distributed.ranks import Ranks
from trainer.distributed.replica import Replica
from trainer.durable import WEIGHTS_SUFFIX, hash_weights, read_manifest
from trainer.errors import CheckpointError, LostRankError, ReplayDifferenceError, RunInUseError, StepOrderError
from trainer.model import Policy
from trainer.retention import prune
from trainer.rundir import AppliedStep, RunDirectory
from trainer.sinks import MetricSinks, check_packages
from trainer.step import Progress

_LOGGER = logging.getLogger(__name__)
_TAKE_OVER_SECONDS = 60.0
"""How long to wait for a run directory that a dying process still holds."""


class Trainer:
    """Trains one run at a time; calls from several threads take turns."""

    def __init__(self, take_over_seconds: float = _TAKE_OVER_SECONDS, ranks: Ranks | None = None) -> None:
        """`ranks` are the processes that train together; without it, this one alone."""
        self._take_over_seconds = take_over_seconds
        self._ranks = ranks or Ranks()
        self._turn = threading.Lock()
        self._run: RunDirectory | None = None
        self._parent_sha256: dict[str, str] = {}
        """Of the weights in memory."""
        self._num_differences = 0
        """How many steps gave other weights than the first time, since a checkpoint was loaded to go on from."""
        self._sinks: MetricSinks | None = None

    def prepare(self, request: PrepareTrainerRequest) -> Weights:
        """Make checkpoint 0 from the user's model unless the run has one; answers the newest applied weights.

        Raises:
            TrainingError: a package that `train.metrics` asks for is not installed.
            CheckpointError: the model cannot be read, or the run has steps but no complete checkpoint.
            RunInUseError: another process trains this run.
            LostRankError: one of several processes was lost.
        """
        check_packages(request.train.metrics)
        with self._take_turn(request.train.step_timeout_seconds):
            run = self._open(Path(request.run_dir))
            version = run.latest_applied()
            if not any(is_complete(run.checkpoint(step)) for step in run.checkpoint_steps()):
                if version > 0:
                    raise CheckpointError(f"{run.root} has {version} applied steps but no complete checkpoint")
                self._start(run, request)
            if not is_complete(run.weights(version)):
                # Of a fork from a step whose weights were let go of.
                self._reach(run, version, request, _ignore)
                save_weights(run, self._collect(), version)
            self._copy_metrics(run, request)
            return self._published(run, version)

    def train_step(self, request: TrainRequest, on_progress: Progress) -> TrainResult:
        """Turn version `step - 1` into version `step`, or look up that this was done.

        `on_progress` is told in words what goes on, several times a second to several times a minute; what it raises
        ends the step, which is then not applied.

        Raises:
            TrainingDataError: the batch must not be trained.
            StepOrderError: version `step - 1` cannot be reached, or the step was applied with another batch.
            CheckpointError: no complete checkpoint.
            RunInUseError: another process trains this run.
            LostRankError: one of several processes was lost.
            StoreError: a blob is missing or broken.
        """
        with self._take_turn(request.train.step_timeout_seconds):
            run = self._open(Path(request.run_dir))
            record = run.read_record(request.step)
            if record is not None:
                result = self._look_up(run, record, request, on_progress)
            else:
                self._reach(run, request.step - 1, request, on_progress)
                result = self._apply(run, request, on_progress)
            self._copy_metrics(run, request)
            return result

    @property
    def lost_a_process(self) -> bool:
        """Whether one of several processes was lost: this one can do nothing more, and must end."""
        return self._ranks.lost

    def close(self) -> None:
        """Forget the model, let go of the run directory, and let the other processes end."""
        self._let_go()
        self._ranks.close()

    def _copy_metrics(self, run: RunDirectory, request: TrainRequest | PrepareTrainerRequest) -> None:
        """Bring the sinks up to the record, and have them follow it. Never fails."""
        if self._sinks is None or self._sinks.spec != request.train.metrics:
            self._close_sinks()
            self._sinks = MetricSinks(run.root, request.run, request.train.metrics)
        self._sinks.sync()
        self._sinks.follow()

    def _close_sinks(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
            self._sinks = None

    def _let_go(self) -> None:
        self._close_sinks()
        if self._run is not None:
            self._run.unlock()
            self._run = None

    def _open(self, root: Path) -> RunDirectory:
        if self._run is not None and self._run.root == root:
            return self._run
        if self._run is not None:
            self._abandon()
        self._let_go()
        run = RunDirectory(root)
        run.lock(self._take_over_seconds)
        self._run = run
        newest = find_checkpoint(run)
        if newest is not None and newest.record is not None and newest.step > run.latest_applied():
            # Killed between the checkpoint and the record.
            _commit(run, _seal_checkpoint(newest.record, read_manifest(run.checkpoint(newest.step))))
        return run

    def _start(self, run: RunDirectory, request: PrepareTrainerRequest) -> None:
        save_model_files(run, Path(request.model.path))
        self._ranks.do(Begin(model=request.model, train=request.train, seed=request.seed), _ignore)
        policy = self._collect()
        if policy.has_adapters:
            save_base_model(run, policy)
        self._parent_sha256 = _list_weights(save_weights(run, policy, step=0))
        self._num_differences = 0
        self._save_checkpoint(run, policy, step=0, record=None)

    def _reach(
        self, run: RunDirectory, version: int, request: TrainRequest | PrepareTrainerRequest, on_progress: Progress
    ) -> None:
        """Get to `version`: it is in memory, or the newest checkpoint and the stored batches since lead to it."""
        latest = run.latest_applied()
        if latest != version:
            raise StepOrderError(
                f"{run.root}: step {version + 1} needs weight version {version}, "
                f"but the newest applied step is {latest}"
            )
        if self._replica.version == version:
            return
        about = find_checkpoint(run, newest=version)
        if about is None:
            raise CheckpointError(f"{run.root}: no complete checkpoint up to step {version}")
        try:
            self._go_on_from(run, about, version, request.train, on_progress)
        except BaseException:
            self._abandon()
            raise

    def _go_on_from(
        self, run: RunDirectory, about: TrainerState, version: int, train: TrainSection, on_progress: Progress
    ) -> None:
        """After an exception the model in memory may be at a version whose weights nobody has compared."""
        on_progress(f"loading checkpoint {about.step}")
        self._ranks.do(LoadCheckpoint(run_dir=str(run.root), step=about.step, train=train), on_progress)
        self._parent_sha256, self._num_differences = self._find_weights(run, about), 0
        for step in range(about.step + 1, version + 1):
            self._num_differences += self._replay(run, step, train.on_replay_difference, on_progress)

    def _find_weights(self, run: RunDirectory, about: TrainerState) -> dict[str, str]:
        """Of the weights of a checkpoint that was loaded."""
        if about.record is not None:
            return about.record.weights_sha256
        if is_complete(run.weights(about.step)):
            return _list_weights(read_manifest(run.weights(about.step)))
        return hash_weights(run.root, self._collect().save)

    def _replay(
        self, run: RunDirectory, step: int, on_difference: Literal["warn", "fail"], on_progress: Progress
    ) -> bool:
        """Apply a recorded step again in memory; its weights are out already and stay as they are.

        Returns whether it gave other weights.
        """
        request = run.read_request(step)
        if request is None:
            raise StepOrderError(f"{run.root}: the newest checkpoint is behind, and request {step} is gone")
        _LOGGER.info("training step %d again after a lost process", step)
        self._ranks.do(LoadBatch(request=request), on_progress)
        self._ranks.do(Apply(), on_progress)
        record = run.read_record(step)
        hashes = self._parent_sha256 = hash_weights(run.root, self._collect().save)
        if record is None or record.weights_sha256 == hashes:
            return False
        text = f"{run.root}: step {step} trained again gave weights {hashes}, but {record.weights_sha256} are out"
        if on_difference == "fail":
            raise ReplayDifferenceError(text)
        _LOGGER.error("%s", text)
        return True

    def _apply(self, run: RunDirectory, request: TrainRequest, on_progress: Progress) -> TrainResult:
        started = time.perf_counter()
        on_progress(f"step {request.step} loading its batch")
        self._ranks.do(LoadBatch(request=request), on_progress)
        run.write_request(request)
        metrics = {"load_batch_seconds": time.perf_counter() - started, "num_processes": float(self._ranks.size)}
        if self._num_differences:
            metrics["num_replay_differences"] = float(self._num_differences)
        try:
            record = self._apply_and_save(run, request, metrics, on_progress)
        except BaseException:
            self._abandon()
            raise
        self._parent_sha256, self._num_differences = record.weights_sha256, 0
        prune(run, request.train)
        return record.result

    def _apply_and_save(
        self, run: RunDirectory, request: TrainRequest, metrics: dict[str, float], on_progress: Progress
    ) -> AppliedStep:
        """After an exception the model in memory may be ahead of what is on disk."""
        self._ranks.do(Apply(), on_progress)
        applied = time.perf_counter()
        on_progress(f"step {request.step} writing weights")
        policy = self._collect()
        manifest = save_weights(run, policy, request.step)
        metrics |= self._replica.metrics | {"save_weights_seconds": time.perf_counter() - applied}
        record = AppliedStep(
            batch=request.batch,
            weights_sha256=_list_weights(manifest),
            result=TrainResult(
                step=request.step,
                weights=Weights(version=request.step, path=str(run.weights(request.step))),
                metrics=metrics,
            ),
            mark=request.mark,
            parent_sha256=self._parent_sha256,
            device=self._replica.device_type,
            num_threads=torch.get_num_threads(),
        )
        if request.step % request.train.checkpoint_every == 0:
            record = _seal_checkpoint(record, self._save_checkpoint(run, policy, request.step, record))
        _commit(run, record)
        return record

    def _abandon(self) -> None:
        """Drop the model; the next call loads a checkpoint."""
        with contextlib.suppress(LostRankError):
            self._ranks.do(Forget(), _ignore)

    def _collect(self) -> Policy:
        """A policy with all weights, at the version in memory."""
        self._ranks.do(Collect(), _ignore)
        policy = self._replica.whole
        assert policy is not None
        return policy

    def _save_checkpoint(self, run: RunDirectory, policy: Policy, step: int, record: AppliedStep | None) -> Manifest:
        about = TrainerState(
            step=step,
            num_threads=torch.get_num_threads(),
            num_processes=self._ranks.size,
            record=record,
            model_dtype=policy.model_dtype,
            publish_dtype=policy.publish_dtype,
        )
        return save_checkpoint(
            run, policy, about, lambda directory: self._ranks.do(SaveOptimizer(directory=str(directory)), _ignore)
        )

    def _look_up(
        self, run: RunDirectory, record: AppliedStep, request: TrainRequest, on_progress: Progress
    ) -> TrainResult:
        if record.batch != request.batch:
            raise StepOrderError(f"{run.root}: step {request.step} was applied with another batch")
        newest = run.latest_applied() == request.step
        if newest and not is_complete(run.weights(request.step)):
            self._reach(run, request.step, request, on_progress)
            save_weights(run, self._collect(), request.step)
        return record.result.model_copy(update={"applied": False})

    @property
    def _replica(self) -> Replica:
        return self._ranks.replica

    def _published(self, run: RunDirectory, version: int) -> Weights:
        read_manifest(run.weights(version))
        return Weights(version=version, path=str(run.weights(version)))

    @contextlib.contextmanager
    def _take_turn(self, timeout_seconds: float) -> Iterator[None]:
        if not self._turn.acquire(timeout=timeout_seconds):
            raise RunInUseError(f"the trainer was busy with another call for {timeout_seconds:g} s")
        try:
            yield
        finally:
            self._turn.release()


def _list_weights(manifest: Manifest) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in manifest.files.items() if name.endswith(WEIGHTS_SUFFIX)}


def _seal_checkpoint(record: AppliedStep, manifest: Manifest) -> AppliedStep:
    """The record with the hashes of all files of the step's checkpoint: master weights and optimizer too."""
    hashes = {name: entry.sha256 for name, entry in manifest.files.items()}
    return record.model_copy(update={"checkpoint_sha256": hashes})


def _commit(run: RunDirectory, record: AppliedStep) -> None:
    """From here on the step is applied."""
    run.append_metrics(record.result.step, record.result.metrics)
    run.write_record(record)


def _ignore(text: str) -> None:
    """No one follows the progress of what is over at once."""
