"""What one process holds of a run, and how it does what rank 0 commands. Used by a single process just the same."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from trainer.batch import TrainingBatch, load_batch
from trainer.checkpoint import LoadedState, begin_state, load_checkpoint, read_checkpoint, save_optimizer
from trainer.distributed.commands import Apply, Begin, Collect, Forget, LoadBatch, LoadCheckpoint, SaveOptimizer, Work
from trainer.distributed.placement import Placement, build_placement
from trainer.model import Policy
from trainer.rundir import RunDirectory
from trainer.step import Progress, apply_step

Parallel = Literal["ddp", "fsdp"]


class Replica:
    """One process's share of model, optimizer and batch."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self._size = size
        self._device = device
        self._batch: TrainingBatch | None = None
        self._work: LoadBatch | None = None
        self.state: LoadedState | None = None
        """None after anything that may have left it half updated."""
        self.whole: Policy | None = None
        """After `Collect`, on rank 0: a policy with all weights."""
        self.metrics: dict[str, float] = {}
        """Those of the step last applied."""

    @property
    def version(self) -> int | None:
        """Weight version in memory."""
        return None if self.state is None else self.state.version

    @property
    def device_type(self) -> str:
        """`cpu`, `cuda`, ..."""
        return self._loaded.policy.device.type

    def do(self, work: Work, on_progress: Progress) -> None:
        """Do a piece of work; all ranks do the same piece at the same time.

        Raises:
            TrainingError: as the piece of work has it, on every rank for the same reason; or on this rank alone.
            StoreError: a blob is missing or broken.
        """
        match work:
            case Begin():
                self._forget()
                self.state = begin_state(work.model, work.train, work.seed, self._place(work.train.parallel))
            case LoadCheckpoint():
                self._forget()
                run = RunDirectory(Path(work.run_dir))
                about = read_checkpoint(run, work.step)
                self.state = load_checkpoint(run, about, work.train, self._place(work.train.parallel))
            case LoadBatch():
                self._work = work
                self._batch = load_batch(work.request, self._loaded.policy.vocab_size)
            case Apply():
                self._apply(on_progress)
            case Collect():
                self.whole = self._loaded.placement.whole(self._loaded.policy)
            case SaveOptimizer():
                save_optimizer(self._loaded, Path(work.directory))
            case Forget():
                self._forget()

    def _apply(self, on_progress: Progress) -> None:
        state, work, batch = self._loaded, self._work, self._batch
        if work is None or batch is None:
            raise RuntimeError("no batch is loaded")
        self._forget()  # half updated if anything below fails; the next call then loads the checkpoint
        self.metrics = apply_step(state, batch, work.request, on_progress)
        self.state = state

    @property
    def _loaded(self) -> LoadedState:
        if self.state is None:
            raise RuntimeError("no model is loaded")
        return self.state

    def _forget(self) -> None:
        self.state = self.whole = self._batch = self._work = None

    def _place(self, parallel: Parallel) -> Placement:
        return build_placement(parallel, self.rank, self._size, self._device)
