"""What is removed from a run directory and the store after a step, and what never is.

A resume needs the newest complete checkpoint, and the requests and samples of the steps after it; all of those stay
for as many checkpoints as are kept. Engines need the newest weights. Every removal can be cut short and repeated:
directories are renamed before they are deleted, and samples go before the request that names them.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from everroll.contracts.rollout import GroupManifest
from everroll.contracts.spec import TrainSection
from everroll.contracts.training import TrainRequest
from everroll.run_files import is_complete
from everroll.store import StoreError, open_store
from trainer.durable import remove_directory
from trainer.errors import CheckpointError
from trainer.rundir import RunDirectory

_LOGGER = logging.getLogger(__name__)


def prune(run: RunDirectory, train: TrainSection) -> None:
    """Remove what `train` says need not stay. A failure is logged: the step is applied all the same."""
    try:
        oldest = _prune_checkpoints(run, train)
        for step in run.weights_steps()[train.keep_weights :]:
            remove_directory(run.weights(step))
        if train.keep_samples == "replay" and oldest is not None:
            for step in reversed(run.request_steps()):
                if step <= oldest:
                    _remove_samples(run, step)
    except (OSError, StoreError, CheckpointError) as error:
        _LOGGER.warning("%s: what is no longer needed could not be removed: %s", run.root, error)


def _prune_checkpoints(run: RunDirectory, train: TrainSection) -> int | None:
    """Returns the oldest step that a resume may start from; None as long as no checkpoint is complete."""
    complete = [step for step in run.checkpoint_steps() if is_complete(run.checkpoint(step))]
    kept = complete[: train.keep_checkpoints]
    if not kept:
        return None
    for step in run.checkpoint_steps():
        is_milestone = train.keep_every > 0 and step > 0 and step % train.keep_every == 0
        if step < kept[-1] and not (is_milestone and step in complete):
            remove_directory(run.checkpoint(step))
    return kept[-1]


def _remove_samples(run: RunDirectory, step: int) -> None:
    """The samples of a trained step, then its request. Manifests stay: they are small, and say what was trained.

    A fork's first requests are copies that name the run it comes from, whose samples they are: those stay.
    """
    request = run.read_request(step)
    if request is not None and Path(request.run_dir).resolve() == run.root.resolve():
        _remove_blobs(request)
    run.remove_request(step)


def _remove_blobs(request: TrainRequest) -> None:
    store = open_store(request.store_url)
    for item in request.batch:
        try:
            manifest = GroupManifest.model_validate_json(store.get(item.manifest))
        except ValidationError as error:
            _LOGGER.warning("manifest %s cannot be read, its samples stay: %s", item.manifest.uri, error)
            continue
        for outcome in manifest.outcomes:
            if outcome.samples is not None:
                store.delete(outcome.samples.blob)
