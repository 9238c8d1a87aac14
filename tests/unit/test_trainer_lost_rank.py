"""What a process of several does once it has noticed that another was lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.distributed.world import World

SECONDS = 10.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """One of one, which does not end the process when it breaks."""
    monkeypatch.setattr("trainer.distributed.world._end_process", lambda: None)
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        yield World(0, 1, torch.device("cpu"), timedelta(seconds=SECONDS))
    finally:
        dist.destroy_process_group()


class HeldUp(logging.Handler):
    """A log that takes its time: the first line is not out until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        assert self.go_on.wait(SECONDS)
        self.lines.append(record.getMessage())


def test_nothing_ends_for_a_lost_process_before_the_log_says_so(world: World) -> None:
    """Two threads come upon the loss at once; the second ends the process when it may, and the first has said why."""
    log = HeldUp()
    logger = logging.getLogger("trainer.distributed.world")
    logger.addHandler(log)
    told = []
    world.when_broken(lambda: told.append(list(log.lines)))
    first = threading.Thread(target=world.mark_broken, args=("rank 1 was lost",))
    second = threading.Thread(target=world.mark_broken, args=("a command could not be sent",))
    try:
        first.start()
        assert log.begun.wait(SECONDS)
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert not world.broken.is_set()
        log.go_on.set()
        first.join(SECONDS)
        second.join(SECONDS)
    finally:
        log.go_on.set()
        logger.removeHandler(log)
    said = ["LostRankError: rank 0 of 1: rank 1 was lost"]
    assert (log.lines, told, world.broken.is_set()) == (said, [said], True)
