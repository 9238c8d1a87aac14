"""The trainer as a worker holds it: model and optimizer in memory, every step applied exactly once.

A step is applied when its record is on disk. Asked for it again, the trainer answers from the record. A process that
was lost is replaced by one that loads the newest complete checkpoint and trains the stored requests since then again,
which on the same CPU gives the same weights bit for bit; no rollout is needed for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from everroll.contracts.training import PrepareTrainerRequest, TrainRequest, TrainResult, Weights
from trainer.batch import load_batch
from trainer.checkpoint import (
    LoadedState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_model_files,
    save_weights,
)
from trainer.durable import Manifest, is_complete, read_manifest
from trainer.errors import CheckpointError, RunInUseError, StepOrderError
from trainer.model import load_policy
from trainer.optimizer import build_optimizer
from trainer.rundir import AppliedStep, RunDirectory
from trainer.step import Progress, apply_step

_LOGGER = logging.getLogger(__name__)
_TAKE_OVER_SECONDS = 60.0
"""How long to wait for a run directory that a dying process still holds."""


class Trainer:
    """Trains one run at a time; calls from several threads take turns."""

    def __init__(self, take_over_seconds: float = _TAKE_OVER_SECONDS) -> None:
        self._take_over_seconds = take_over_seconds
        self._turn = threading.Lock()
        self._run: RunDirectory | None = None
        self._state: LoadedState | None = None

    def prepare(self, request: PrepareTrainerRequest) -> Weights:
        """Make checkpoint 0 from the user's model unless the run has one; answers the newest applied weights.

        Raises:
            CheckpointError: the model cannot be read, or the run has steps but no complete checkpoint.
            RunInUseError: another process trains this run.
        """
        with self._take_turn(request.train.step_timeout_seconds):
            run = self._open(Path(request.run_dir))
            version = run.latest_applied()
            if not any(is_complete(run.checkpoint(step)) for step in run.checkpoint_steps()):
                if version > 0:
                    raise CheckpointError(f"{run.root} has {version} applied steps but no complete checkpoint")
                self._start(run, request)
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
            StoreError: a blob is missing or broken.
        """
        with self._take_turn(request.train.step_timeout_seconds):
            run = self._open(Path(request.run_dir))
            record = run.read_record(request.step)
            if record is not None:
                return self._look_up(run, record, request, on_progress)
            state = self._reach(run, request.step - 1, request, on_progress)
            return self._apply(run, state, request, on_progress)

    def close(self) -> None:
        """Forget the model and let go of the run directory."""
        self._state = None
        if self._run is not None:
            self._run.unlock()
            self._run = None

    def _open(self, root: Path) -> RunDirectory:
        if self._run is not None and self._run.root == root:
            return self._run
        self.close()
        run = RunDirectory(root)
        run.lock(self._take_over_seconds)
        self._run = run
        newest = find_checkpoint(run)
        if newest is not None and newest.record is not None and newest.step > run.latest_applied():
            _commit(run, newest.record)  # killed between the checkpoint and the record
        return run

    def _start(self, run: RunDirectory, request: PrepareTrainerRequest) -> None:
        model_path = Path(request.model.path)
        policy = load_policy(model_path, request.train)
        save_model_files(run, model_path)
        state = LoadedState(policy, build_optimizer(policy, request.train), version=0)
        save_weights(run, policy, step=0)
        save_checkpoint(run, state, record=None)
        self._state = state

    def _reach(self, run: RunDirectory, version: int, request: TrainRequest, on_progress: Progress) -> LoadedState:
        """The state at `version`: the one in memory, or the newest checkpoint and the stored batches since."""
        latest = run.latest_applied()
        if latest != version:
            raise StepOrderError(
                f"{run.root}: step {version + 1} needs weight version {version}, "
                f"but the newest applied step is {latest}"
            )
        if self._state is not None and self._state.version == version:
            return self._state
        self._state = None
        about = find_checkpoint(run, newest=version)
        if about is None:
            raise CheckpointError(f"{run.root}: no complete checkpoint up to step {version}")
        on_progress(f"loading checkpoint {about.step}")
        state = load_checkpoint(run, about, request.train)
        for step in range(about.step + 1, version + 1):
            self._replay(run, state, step, on_progress)
        self._state = state
        return state

    def _replay(self, run: RunDirectory, state: LoadedState, step: int, on_progress: Progress) -> None:
        """Apply a recorded step again in memory; its weights are out already and stay as they are."""
        request = run.read_request(step)
        if request is None:
            raise StepOrderError(f"{run.root}: checkpoint {state.version} is behind, and request {step} is gone")
        _LOGGER.info("training step %d again after a lost process", step)
        apply_step(state, load_batch(request, state.policy.vocab_size), request, on_progress)

    def _apply(
        self, run: RunDirectory, state: LoadedState, request: TrainRequest, on_progress: Progress
    ) -> TrainResult:
        started = time.perf_counter()
        on_progress(f"step {request.step} loading its batch")
        batch = load_batch(request, state.policy.vocab_size)
        run.write_request(request)
        loaded = time.perf_counter()
        self._state = None  # half updated if anything below fails; the next call then loads the checkpoint
        metrics = apply_step(state, batch, request, on_progress)
        applied = time.perf_counter()
        on_progress(f"step {request.step} writing weights")
        manifest = save_weights(run, state.policy, request.step)
        metrics |= {
            "load_batch_seconds": loaded - started,
            "save_weights_seconds": time.perf_counter() - applied,
        }
        record = _build_record(run, request, manifest, metrics)
        if request.step % request.train.checkpoint_every == 0:
            save_checkpoint(run, state, record)
        _commit(run, record)
        self._state = state
        run.prune(request.train.keep_checkpoints)
        return record.result

    def _look_up(
        self, run: RunDirectory, record: AppliedStep, request: TrainRequest, on_progress: Progress
    ) -> TrainResult:
        if record.batch != request.batch:
            raise StepOrderError(f"{run.root}: step {request.step} was applied with another batch")
        newest = run.latest_applied() == request.step
        if newest and not is_complete(run.weights(request.step)):
            state = self._reach(run, request.step, request, on_progress)
            save_weights(run, state.policy, request.step)
        return record.result.model_copy(update={"applied": False})

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


def _build_record(
    run: RunDirectory, request: TrainRequest, manifest: Manifest, metrics: dict[str, float]
) -> AppliedStep:
    weights = Weights(version=request.step, path=str(run.weights(request.step)))
    hashes = {name: entry.sha256 for name, entry in manifest.files.items() if name.endswith(".safetensors")}
    result = TrainResult(step=request.step, weights=weights, metrics=metrics)
    return AppliedStep(batch=request.batch, weights_sha256=hashes, result=result)


def _commit(run: RunDirectory, record: AppliedStep) -> None:
    """From here on the step is applied."""
    run.append_metrics(record.result.step, record.result.metrics)
    run.write_record(record)
