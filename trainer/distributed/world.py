"""The processes of one trainer, as torchrun started them, and how rank 0 commands the others.

Rank 0 sends commands; the others wait for them. While there is nothing to do it sends `Idle` every few seconds, so that
hours without work are fine and yet each wait is bounded: a process that hears nothing for a minute gives up. Every
command ends with an exchange of how it went.

The others send rank 0 a sign of life every few seconds, whatever they do. Rank 0 listens to each in a thread, so it
notices at once when a connection breaks, also while it computes, and within a minute when a machine goes silent.

Commands, outcomes, signs of life and tensors travel in process groups of their own, so that a failure in one never
mixes up another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.errors import LostRankError

_LOGGER = logging.getLogger(__name__)
IDLE_SECONDS = 5.0
SILENCE_SECONDS = 60.0
LAST_SECONDS = 30.0
"""How long a process that has lost another one may take to say so and end, before it is ended."""


class World:
    """Rank and size, and the channels between ranks."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        collective_limit: timedelta,
        idle_seconds: float = IDLE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """The default process group exists already."""
        self._idle_seconds = idle_seconds
        silence_limit = timedelta(seconds=silence_seconds)
        self.rank = rank
        self.size = size
        self.device = device
        self.broken = threading.Event()
        """Set for good when a process was lost, once the log says so: this process must end too."""
        self._breaking = threading.Lock()
        self._commands = dist.new_group(backend="gloo", timeout=silence_limit)
        self._outcomes = dist.new_group(backend="gloo", timeout=collective_limit)
        self._signs = dist.new_group(backend="gloo", timeout=silence_limit)
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._on_loss: Callable[[], None] = _do_nothing

    def when_broken(self, act: Callable[[], None]) -> None:
        """Call `act`, from any thread, once a process was lost."""
        self._on_loss = act
        if self.broken.is_set():
            act()

    def mark_broken(self, why: str) -> None:
        """From here on nothing more can be done.

        Said in the log before anything else: what started the processes may end this one before an error gets anywhere,
        and so may a second thread that comes upon the loss, as it does when it finds the world broken. And this process
        ends for certain: its main thread may be waiting for one that is silent.
        """
        with self._breaking:
            if self.broken.is_set():
                return
            _LOGGER.critical("LostRankError: rank %d of %d: %s", self.rank, self.size, why)
            self.broken.set()
        threading.Thread(target=_end_process, daemon=True, name="end").start()
        self._on_loss()

    @contextlib.contextmanager
    def command(self, command: str) -> Iterator[None]:
        """Send a command from rank 0 to all others; within the block they obey it, and get no other.

        Raises:
            LostRankError: a process was lost.
        """
        with self._turn:
            self._send(command)
            yield

    def _send(self, command: str) -> None:
        with self._noticing_loss("a command could not be sent"):
            dist.broadcast_object_list([command], src=0, group=self._commands)

    def receive(self) -> str:
        """The next command from rank 0.

        Raises:
            LostRankError: rank 0 was lost, or was silent for too long.
        """
        box: list[str] = [""]
        with self._noticing_loss("rank 0 sends no more commands"):
            dist.broadcast_object_list(box, src=0, group=self._commands)
        return box[0]

    def exchange(self, outcome: str | None) -> list[str | None]:
        """Everyone's outcome of a command, by rank: None, or what went wrong.

        Raises:
            LostRankError: a process was lost.
        """
        outcomes: list[str | None] = [None] * self.size
        with self._noticing_loss("the outcome of a command is not known"):
            dist.all_gather_object(outcomes, outcome, group=self._outcomes)
        return outcomes

    def start_idling(self, idle_command: str) -> None:
        """Send a command every few seconds from a thread of its own, while there is no other."""
        threading.Thread(target=self._idle, args=(idle_command, os.getppid()), daemon=True, name="idle").start()

    def start_watching(self) -> None:
        """Rank 0: notice when another rank is lost, whatever this one does."""
        for peer in range(1, self.size):
            threading.Thread(target=self._listen, args=(peer,), daemon=True, name=f"listen-{peer}").start()

    def start_signing(self) -> None:
        """Ranks other than 0: send signs of life until the process ends."""
        threading.Thread(target=self._sign, daemon=True, name="sign").start()

    def close(self) -> None:
        """From here on, a rank that ends is no loss."""
        self._closed.set()

    def _listen(self, peer: int) -> None:
        try:
            while not self._closed.is_set():
                dist.recv(torch.zeros(1), src=peer, group=self._signs)
        except RuntimeError as error:
            if not self._closed.is_set():
                self.mark_broken(f"rank {peer} was lost: {error}")

    def _sign(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, which the next command or exchange tells
            while True:
                dist.send(torch.zeros(1), dst=0, group=self._signs)
                time.sleep(self._idle_seconds)

    def _idle(self, command: str, parent: int) -> None:
        while not self._closed.wait(self._idle_seconds):
            if os.getppid() != parent:
                _LOGGER.critical("torchrun has ended; so does this process")
                os._exit(1)
            if self.broken.is_set() or not self._turn.acquire(blocking=False):
                continue  # a command is being obeyed, and who obeys does not listen
            try:
                with contextlib.suppress(LostRankError):
                    self._send(command)
            finally:
                self._turn.release()

    @contextlib.contextmanager
    def _noticing_loss(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.mark_broken(f"{what}: {error}")
            raise LostRankError(f"rank {self.rank} of {self.size}: {what}: {error}") from error


def _end_process() -> None:
    time.sleep(LAST_SECONDS)
    _LOGGER.critical("this process does not end by itself; it is ended")
    os._exit(1)


def _do_nothing() -> None:
    """No one wants to know."""


def is_distributed(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process as one of several."""
    return int(environment.get("WORLD_SIZE", "1")) > 1


def join_world(
    collective_seconds: float, idle_seconds: float = IDLE_SECONDS, silence_seconds: float = SILENCE_SECONDS
) -> World:
    """Meet the other processes that torchrun started; each takes the accelerator of its local rank, if there is one.

    No collective operation may take longer than `collective_seconds`. When there is nothing to do, rank 0 says so every
    `idle_seconds`, as often as the others send signs of life; `silence_seconds` without any count as a loss.
    """
    limit = timedelta(seconds=collective_seconds)
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=limit)
    return World(dist.get_rank(), dist.get_world_size(), device, limit, idle_seconds, silence_seconds)
