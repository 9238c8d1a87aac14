"""Weights and checkpoints of a step.

A checkpoint is the weights' directory (Hugging Face layout, float32) plus `optimizer.safetensors` and
`trainer_state.json`. Both kinds appear whole or not at all, and are checked by hash before they are loaded. Nothing
random is carried from step to step: the learning rate is a function of the step, and random numbers are seeded from
the run's seed and the step.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from everroll.contracts.base import Payload
from everroll.contracts.spec import TrainSection
from trainer.durable import (
    MANIFEST_NAME,
    Manifest,
    TornDirectoryError,
    check_directory,
    link_file,
    write_directory,
)
from trainer.errors import CheckpointError
from trainer.model import Policy, load_policy
from trainer.optimizer import build_optimizer, export_optimizer_state, import_optimizer_state
from trainer.rundir import AppliedStep, RunDirectory

_LOGGER = logging.getLogger(__name__)
_OPTIMIZER_NAME = "optimizer.safetensors"
_STATE_NAME = "trainer_state.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack", ".onnx")
_WRITTEN_BY_TRAINER = ("config.json", "generation_config.json", MANIFEST_NAME, _STATE_NAME)


class TrainerState(Payload):
    """What a checkpoint says of itself."""

    schema_version: int = 1
    step: int
    """Weight version of the checkpoint."""
    num_threads: int
    """CPU threads of the process that wrote it: another number can change the last bits of what follows."""
    record: AppliedStep | None = None
    """The record of its step; None for step 0."""


class LoadedState:
    """A model and its optimizer at one weight version."""

    def __init__(self, policy: Policy, optimizer: torch.optim.AdamW, version: int) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.version = version


def save_model_files(run: RunDirectory, model_path: Path) -> None:
    """Keep the user's tokenizer, chat template and the like, once per run."""

    def fill(directory: Path) -> None:
        for path in sorted(model_path.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES) and path.name not in _WRITTEN_BY_TRAINER:
                shutil.copyfile(path, directory / path.name)

    write_directory(run.model_files, fill)


def save_weights(run: RunDirectory, policy: Policy, step: int) -> Manifest:
    """Write what engines load: weights, configuration and the user's model files."""

    def fill(directory: Path) -> None:
        for path in sorted(run.model_files.iterdir()):
            if path.name != MANIFEST_NAME:
                link_file(path, directory / path.name)
        policy.save(directory)

    return write_directory(run.weights(step), fill)


def save_checkpoint(run: RunDirectory, state: LoadedState, record: AppliedStep | None) -> None:
    """Write the checkpoint of a step whose weights are written already; their files are shared."""

    def fill(directory: Path) -> None:
        for path in sorted(run.weights(state.version).iterdir()):
            if path.name != MANIFEST_NAME:
                link_file(path, directory / path.name)
        tensors = export_optimizer_state(state.optimizer, state.policy)
        save_file(tensors, directory / _OPTIMIZER_NAME)
        about = TrainerState(step=state.version, num_threads=torch.get_num_threads(), record=record)
        (directory / _STATE_NAME).write_text(about.model_dump_json(indent=1))

    write_directory(run.checkpoint(state.version), fill)


def find_checkpoint(run: RunDirectory, newest: int | None = None) -> TrainerState | None:
    """The newest complete checkpoint, at most of step `newest`. A torn one is passed over with a warning."""
    for step in run.checkpoint_steps():
        if newest is not None and step > newest:
            continue
        try:
            check_directory(run.checkpoint(step))
            return TrainerState.model_validate_json((run.checkpoint(step) / _STATE_NAME).read_bytes())
        except (TornDirectoryError, ValidationError, OSError) as error:
            _LOGGER.warning("passing over a torn checkpoint: %s", error)
    return None


def load_checkpoint(run: RunDirectory, about: TrainerState, train: TrainSection) -> LoadedState:
    """Load what `find_checkpoint` found.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    directory = run.checkpoint(about.step)
    if about.num_threads != torch.get_num_threads():
        _LOGGER.warning(
            "%s was written with %d threads, this process has %d: the last bits may differ",
            directory,
            about.num_threads,
            torch.get_num_threads(),
        )
    policy = load_policy(directory, train)
    optimizer = build_optimizer(policy, train)
    try:
        tensors = load_file(directory / _OPTIMIZER_NAME)
    except OSError as error:
        raise CheckpointError(f"{directory / _OPTIMIZER_NAME} cannot be read: {error}") from error
    import_optimizer_state(optimizer, policy, tensors)
    return LoadedState(policy, optimizer, about.step)
