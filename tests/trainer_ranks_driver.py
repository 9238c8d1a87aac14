"""Two trainer processes that live as long as rank 0's standard input: `torchrun ... -m tests.trainer_ranks_driver`.

Rank 0 reads one JSON command a line, trains, and answers with one line. `--silence-seconds` is how long a rank may be
silent, and how long one that has lost another has to end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

import torch
from pydantic import BaseModel

from everroll.contracts.outcomes import TrainingError
from everroll.contracts.spec import TrainSection
from everroll.contracts.training import GroupBatchItem
from tests.trainer_helpers import build_prepare_request, build_request
from trainer.distributed import world as world_module
from trainer.distributed.ranks import Ranks, follow
from trainer.distributed.world import join_world
from trainer.service import Trainer


class Command(BaseModel):
    """One line of standard input."""

    root: Path
    first: int
    last: int
    train: TrainSection
    bad_batch: bool = False
    """Ask for an empty batch."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--silence-seconds", type=float, default=60.0)
    silence_seconds = parser.parse_args().silence_seconds
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    world_module.LAST_SECONDS = min(world_module.LAST_SECONDS, silence_seconds)
    # Much idling between any two commands.
    world = join_world(60.0, idle_seconds=0.05, silence_seconds=silence_seconds)
    if world.rank > 0:
        return follow(world)
    ranks = Ranks(world)
    trainer = Trainer(ranks=ranks)
    for line in sys.stdin:
        print(json.dumps(run(trainer, Command.model_validate_json(line))), flush=True)
    trainer.close()
    return int(ranks.lost)


def run(trainer: Trainer, command: Command) -> dict[str, object]:
    """The metrics of the last step, and what was said on the way; or the error."""
    progress: list[str] = []
    metrics: dict[str, float] = {}
    try:
        trainer.prepare(build_prepare_request(command.root, command.train))
        for step in range(command.first, command.last + 1):
            batch: list[GroupBatchItem] | None = [] if command.bad_batch else None
            request = build_request(command.root, step, command.train, batch)
            metrics = trainer.train_step(request, progress.append).metrics
    except TrainingError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"metrics": metrics, "progress": progress}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
