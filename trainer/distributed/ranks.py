"""All processes of a trainer, as rank 0 sees them; and the life of the others."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable

import torch

from everroll.contracts.outcomes import TrainingError
from everroll.store import StoreError
from trainer.distributed.commands import COMMANDS, Idle, Stop, Work
from trainer.distributed.replica import Replica
from trainer.distributed.world import World
from trainer.errors import LostRankError
from trainer.step import Progress

_LOGGER = logging.getLogger(__name__)


class Ranks:
    """Work is done by all ranks or, where there is no world, by this process alone."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world
        self.size = 1 if world is None else world.size
        self.replica = Replica(0, self.size, torch.device("cpu") if world is None else world.device)
        if world is not None:
            world.start_idling(Idle().model_dump_json())
            world.start_watching()

    @property
    def lost(self) -> bool:
        """Whether a process was lost; then this one must end."""
        return self._world is not None and self._world.broken.is_set()

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call `act`, from any thread, once a process was lost."""
        if self._world is not None:
            self._world.when_broken(act)

    def do(self, work: Work, on_progress: Progress) -> None:
        """
        Raises:
            TrainingError: on any rank; all are ready for more work.
            StoreError: on any rank; all are ready for more work.
            LostRankError: a rank was lost, or does not answer. Nothing more can be done: this process must end.
        """
        world = self._world
        if world is None:
            self.replica.do(work, on_progress)
            return

        def report(text: str) -> None:
            self._check_lost()
            on_progress(text)

        self._check_lost()
        with world.command(work.model_dump_json()):
            outcomes = self._obey(world, work, report)
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise TrainingError(f"rank {rank}: {outcome}")

    def _check_lost(self) -> None:
        if self.lost:
            raise LostRankError("a process of this trainer was lost; it starts again")

    def _obey(self, world: World, work: Work, on_progress: Progress) -> list[str | None]:
        """Do this rank's part; returns what went wrong on the others."""
        failure = _attempt(self.replica, work, on_progress)
        if isinstance(failure, LostRankError):
            raise failure
        if failure is not None and not isinstance(failure, (TrainingError, StoreError)):
            world.mark_broken(f"{work.kind} broke off: {failure!r}")  # the others may be waiting within the work
            if isinstance(failure, RuntimeError):
                raise LostRankError(f"{work.kind} broke off: {failure}") from failure
            raise failure
        outcomes = world.exchange(_describe(failure))
        if failure is not None:
            raise failure
        return outcomes

    def close(self) -> None:
        """Let the other ranks end."""
        world = self._world
        if world is None or world.broken.is_set():
            return
        world.close()
        with contextlib.suppress(LostRankError), world.command(Stop().model_dump_json()):
            pass  # one that was lost has ended already


def follow(world: World) -> int:
    """The life of a rank other than 0: do what rank 0 says until it says stop. Returns the exit code.

    SIGTERM and SIGINT are left to rank 0, which finishes what it has begun and then says stop; its end is noticed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    replica = Replica(world.rank, world.size, world.device)
    world.start_signing()
    _LOGGER.info("rank %d of %d follows (process %d)", world.rank, world.size, os.getpid())
    try:
        while True:
            command = COMMANDS.validate_json(world.receive())
            if isinstance(command, Stop):
                return 0
            if isinstance(command, Idle):
                continue
            failure = _attempt(replica, command, _ignore)
            if failure is not None and not isinstance(failure, (TrainingError, StoreError)):
                raise failure
            world.exchange(_describe(failure))
    except Exception as error:
        _LOGGER.critical("rank %d of %d ends: %s: %s", world.rank, world.size, type(error).__name__, error)
        return 1


def _attempt(replica: Replica, work: Work, on_progress: Progress) -> Exception | None:
    try:
        replica.do(work, on_progress)
    except Exception as error:
        return error
    return None


def _describe(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _ignore(text: str) -> None:
    """Rank 0 tells how far the work is."""
