"""Weights and checkpoints of a step.

A checkpoint is the weights' directory (Hugging Face layout, float32) plus the optimizer's state and
`trainer_state.json`. Both kinds appear whole or not at all, and are checked by hash before they are loaded. Nothing
random is carried from step to step: the learning rate is a function of the step, and random numbers are seeded from
the run's seed and the step.

The optimizer's state is `optimizer.safetensors` where every process has all of it, and torch.distributed.checkpoint's
format (`.metadata`, `*.distcp`) where it is sharded, each process writing its part. Any number of processes loads both.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from everroll.contracts.base import Payload
from everroll.contracts.spec import ModelSection, TrainSection
from everroll.run_files import MANIFEST_NAME, Manifest
from trainer.distributed.placement import ALONE, Forward, Placement
from trainer.durable import (
    TornDirectoryError,
    check_directory,
    link_file,
    write_directory,
)
from trainer.errors import CheckpointError
from trainer.model import Policy, load_policy
from trainer.optimizer import build_optimizer, export_optimizer_state, import_optimizer_state
from trainer.reference import Reference
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
    num_processes: int = 1
    """Processes that trained it: another number, too, changes the last bits."""
    record: AppliedStep | None = None
    """The record of its step; None for step 0."""
    model_dtype: str | None = None
    """What the starting model's configuration names; this one names what was published. None in earlier versions."""
    publish_dtype: str | None = None
    """Of the weights that its step published; None in earlier versions."""


class LoadedState:
    """A model and its optimizer at one weight version, or this process's share of them."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.AdamW,
        version: int,
        placement: Placement = ALONE,
        forward: Forward | None = None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.version = version
        self.placement = placement
        self.compute_logprobs = forward or policy.compute_logprobs
        self.reference: Reference | None = None
        """Loaded by the first step that wants it."""


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
        _link_files(run.model_files, directory)
        policy.save(directory)

    return write_directory(run.weights(step), fill)


def _link_files(source: Path, directory: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.name != MANIFEST_NAME:
            link_file(path, directory / path.name)


def save_base_model(run: RunDirectory, policy: Policy) -> None:
    """Keep the model that adapters belong to, once per run."""

    def fill(directory: Path) -> None:
        _link_files(run.model_files, directory)
        policy.save_base(directory)

    write_directory(run.base_model, fill)


def save_checkpoint(
    run: RunDirectory,
    policy: Policy,
    about: TrainerState,
    fill_optimizer: Callable[[Path], None],
) -> Manifest:
    """Write the checkpoint of a step whose weights are written already; files that are the same are shared.

    `fill_optimizer` writes the optimizer's state into a directory, with all processes.
    """

    def fill(directory: Path) -> None:
        if policy.weights_are_masters:
            _link_files(run.weights(about.step), directory)
        else:
            _link_files(run.base_model if policy.has_adapters else run.model_files, directory)
            policy.save_masters(directory)
        fill_optimizer(directory)
        (directory / _STATE_NAME).write_text(about.model_dump_json(indent=1))

    return write_directory(run.checkpoint(about.step), fill)


def save_optimizer(state: LoadedState, directory: Path) -> None:
    """This process's part of the optimizer's state; all processes call it."""
    tensors = export_optimizer_state(state.optimizer, state.policy)
    if state.placement.is_sharded:
        save_sharded(tensors, storage_writer=FileSystemWriter(directory))
    elif state.placement.rank == 0:
        save_file(tensors, directory / _OPTIMIZER_NAME)


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


def read_checkpoint(run: RunDirectory, step: int) -> TrainerState:
    """What a checkpoint says of itself, after rank 0 has checked it.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = run.checkpoint(step) / _STATE_NAME
    try:
        return TrainerState.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def begin_state(model: ModelSection, train: TrainSection, seed: int, placement: Placement = ALONE) -> LoadedState:
    """Version 0: the user's model, and a fresh optimizer.

    Raises:
        CheckpointError: the model cannot be read.
    """
    policy = load_policy(Path(model.path), train, seed)
    forward = placement.place(policy)
    return LoadedState(policy, build_optimizer(policy, train), 0, placement, forward)


def load_checkpoint(
    run: RunDirectory, about: TrainerState, train: TrainSection, placement: Placement = ALONE
) -> LoadedState:
    """Load what `find_checkpoint` found: at that version, it publishes in the type that the version was published in.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    directory = run.checkpoint(about.step)
    _warn_of_other_arithmetic(directory, about, placement.size)
    policy = load_policy(directory, train, model_dtype=about.model_dtype)
    policy.publish_dtype = about.publish_dtype or policy.publish_dtype
    forward = placement.place(policy)
    optimizer = build_optimizer(policy, train)
    import_optimizer_state(optimizer, policy, _load_optimizer(directory, policy, placement))
    return LoadedState(policy, optimizer, about.step, placement, forward)


def _load_optimizer(directory: Path, policy: Policy, placement: Placement) -> dict[str, Tensor]:
    """The optimizer's state as this process holds its parameters, whoever wrote it."""
    try:
        if (directory / _OPTIMIZER_NAME).exists():
            return placement.lay_out(load_file(directory / _OPTIMIZER_NAME), policy)
        reader = FileSystemReader(directory)
        names = reader.read_metadata().state_dict_metadata
        parameters = dict(policy.named_parameters())
        tensors = {name: _make_room(name, parameters) for name in names}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            load_sharded(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    except (OSError, KeyError, CheckpointException) as error:
        raise CheckpointError(f"the optimizer's state in {directory} cannot be read: {error}") from error
    return tensors


def _make_room(name: str, parameters: dict[str, torch.nn.Parameter]) -> Tensor:
    """A tensor to load `<parameter>.<state>` into, laid out like the parameter; a step count is a number."""
    parameter, _, state = name.rpartition(".")
    return torch.zeros(()) if state == "step" else torch.zeros_like(parameters[parameter], requires_grad=False)


def _warn_of_other_arithmetic(directory: Path, about: TrainerState, num_processes: int) -> None:
    written = (about.num_processes, about.num_threads)
    here = (num_processes, torch.get_num_threads())
    if written != here:
        _LOGGER.warning(
            "%s was written by %d processes of %d threads, here are %d of %d: the last bits may differ",
            *(directory, *written, *here),
        )
