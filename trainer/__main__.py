"""`python -m trainer REQUEST...`: train stored batches by themselves, without a worker.

A request is a file with a `TrainRequest` as JSON, such as `<run_dir>/requests/step_000012.json`, or a directory of such
files, such as `<run_dir>/requests`. They are trained in the order of their steps; what was applied already is looked
up, so an interrupted command goes on where it was. The run directory is used as it is: if it has no checkpoint yet,
checkpoint 0 is made from the requests' model; with `--run-dir` the same batches are trained again elsewhere. Prints one
result a line, as JSON.

With several processes: `torchrun --standalone --nproc-per-node 2 -m trainer REQUEST...`.

Where other processes want the same cores, start it with OMP_WAIT_POLICY=PASSIVE: threads that wait for each other by
spinning made a step eight times slower on two shared cores.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from everroll.contracts.outcomes import TrainingError
from everroll.contracts.training import PrepareTrainerRequest, TrainRequest, TrainResult
from everroll.store import StoreError
from trainer.distributed.ranks import Ranks, follow
from trainer.distributed.world import is_distributed, join_world
from trainer.service import Trainer

_COLLECTIVE_SECONDS = 1800.0


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a step failed, 2 if a request cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train stored batches.")
    parser.add_argument("requests", type=Path, nargs="+", help="files with a TrainRequest as JSON, or directories")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--run-dir", help="use this run directory instead of the requests'")
    arguments = parser.parse_args(command_line)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    if arguments.threads > 0:
        torch.set_num_threads(arguments.threads)
    try:
        requests = read_requests(arguments.requests, arguments.run_dir)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    ranks = None
    if is_distributed(os.environ):
        world = join_world(_COLLECTIVE_SECONDS)
        if world.rank > 0:
            return follow(world)
        ranks = Ranks(world)
    try:
        for result in train(requests, ranks):
            print(result.model_dump_json(), flush=True)
    except (TrainingError, StoreError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def read_requests(paths: Sequence[Path], run_dir: str | None) -> list[TrainRequest]:
    """The requests in files and directories, in the order of their steps.

    Raises:
        ValueError: naming the file that is no request.
    """
    files = [file for path in paths for file in (sorted(path.glob("step_*.json")) if path.is_dir() else [path])]
    requests = []
    for file in files:
        try:
            request = TrainRequest.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise ValueError(f"{file}: {error}") from error
        requests.append(request.model_copy(update={"run_dir": run_dir}) if run_dir else request)
    if not requests:
        raise ValueError(f"no request in {', '.join(map(str, paths))}")
    return sorted(requests, key=lambda request: request.step)


def train(requests: Sequence[TrainRequest], ranks: Ranks | None = None) -> Iterator[TrainResult]:
    """The results, each when its step is applied."""
    trainer = Trainer(ranks=ranks)
    first = requests[0]
    prepare = PrepareTrainerRequest(
        run=first.run, run_dir=first.run_dir, seed=first.seed, model=first.model, train=first.train
    )
    try:
        trainer.prepare(prepare)
        for request in requests:
            yield trainer.train_step(request, logging.info)
    finally:
        trainer.close()


if __name__ == "__main__":
    code = main()
    # Process groups now and then hang when the interpreter takes them down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
