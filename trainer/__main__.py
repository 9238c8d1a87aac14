"""`python -m trainer REQUEST.json`: train one stored batch by itself, without a worker.

REQUEST.json is a `TrainRequest`, such as `<run_dir>/requests/step_000012.json`. The run directory is used as it is: if
it has no checkpoint yet, checkpoint 0 is made from the request's model. Prints the result as JSON.

Where other processes want the same cores, start it with OMP_WAIT_POLICY=PASSIVE: threads that wait for each other by
spinning made a step eight times slower on two shared cores.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from everroll.contracts.outcomes import TrainingError
from everroll.contracts.training import PrepareTrainerRequest, TrainRequest
from everroll.store import StoreError
from trainer.service import Trainer


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if the step failed, 2 if the request cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train one stored batch.")
    parser.add_argument("request", type=Path, help="file with a TrainRequest as JSON")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--run-dir", help="use this run directory instead of the request's")
    arguments = parser.parse_args(command_line)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    try:
        request = TrainRequest.model_validate_json(arguments.request.read_bytes())
    except (OSError, ValidationError) as error:
        print(f"{arguments.request}: {error}", file=sys.stderr)
        return 2
    if arguments.run_dir:
        request = request.model_copy(update={"run_dir": arguments.run_dir})
    try:
        print(train(request))
    except (TrainingError, StoreError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def train(request: TrainRequest) -> str:
    """The result as JSON."""
    trainer = Trainer()
    prepare = PrepareTrainerRequest(
        run=request.run, run_dir=request.run_dir, seed=request.seed, model=request.model, train=request.train
    )
    try:
        trainer.prepare(prepare)
        return trainer.train_step(request, lambda text: logging.info(text)).model_dump_json(indent=1)
    finally:
        trainer.close()


if __name__ == "__main__":
    sys.exit(main())
