"""New weights from a checkpoint directory straight into the model that serves: all of them, or none.

Two halves. `load_weights` reads and checks on any thread while the old weights go on serving; `apply_weights` copies on
the model's own thread and cannot fail half-way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_INDEX_FILE = "model.safetensors.index.json"


class WeightsRefusedError(ValueError):
    """A checkpoint cannot be served by this model; the message says why. The old weights keep serving."""


@dataclass(frozen=True)
class LoadedWeights:
    """Checked tensors, by the names that the model's parameters have."""

    path: str
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class TargetTensors:
    """Where a model's weights go: parameters and persistent buffers, tied ones under all their names."""

    by_name: dict[str, torch.Tensor]

    @staticmethod
    def of(model: torch.nn.Module) -> TargetTensors:
        return TargetTensors(model.state_dict(keep_vars=True))

    def groups(self) -> list[tuple[torch.Tensor, list[str]]]:
        """Each distinct tensor with all of its names."""
        groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, tensor in self.by_name.items():
            groups.setdefault(id(tensor), (tensor, []))[1].append(name)
        return list(groups.values())


def check_names(target: TargetTensors, path: str) -> dict[str, str]:
    """Check that a checkpoint in Hugging Face layout holds this model's tensors, by name.

    Returns:
        For each tensor to be read, its file. Of tied tensors one is enough.

    Raises:
        WeightsRefusedError: no such directory, unreadable, or tensors missing or unknown.
    """
    file_by_name = _list_tensors(Path(path))
    unknown = sorted(set(file_by_name) - set(target.by_name))
    if unknown:
        raise WeightsRefusedError(f"{path}: tensors unknown to this model: {_name_some(unknown)}")
    chosen = {names[0]: next((name for name in names if name in file_by_name), None) for _, names in target.groups()}
    missing = sorted(name for name, found in chosen.items() if found is None)
    if missing:
        raise WeightsRefusedError(f"{path}: tensors missing: {_name_some(missing)}")
    return {found: file_by_name[found] for found in chosen.values() if found is not None}


def load_weights(target: TargetTensors, path: str) -> LoadedWeights:
    """Read a checkpoint (safetensors, in one file or in shards) and check it against the model.

    Raises:
        WeightsRefusedError: see `check_names`; also another shape, or values not finite in the model's dtype.
    """
    names_by_file: dict[str, list[str]] = {}
    for name, file in check_names(target, path).items():
        names_by_file.setdefault(file, []).append(name)
    tensors = {}
    for file, names in names_by_file.items():
        with _open(Path(path) / file) as opened:
            for name in names:
                tensors[name] = _check_tensor(path, name, opened.get_tensor(name), target.by_name[name])
    return LoadedWeights(path, tensors)


def apply_weights(target: TargetTensors, weights: LoadedWeights) -> None:
    """Copy checked weights into the model."""
    with torch.no_grad():
        for name, tensor in weights.tensors.items():
            target.by_name[name].copy_(tensor)


def _list_tensors(directory: Path) -> dict[str, str]:
    """Name of the file of each tensor of a checkpoint."""
    if not directory.is_dir():
        raise WeightsRefusedError(f"{directory}: no such directory")
    index = directory / _INDEX_FILE
    if index.exists():
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsRefusedError(f"{index}: not a safetensors index: {error!r}") from error
    file_by_name: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with _open(file) as opened:
            file_by_name.update(dict.fromkeys(opened.keys(), file.name))
    if not file_by_name:
        raise WeightsRefusedError(f"{directory}: holds no safetensors file")
    return file_by_name


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise WeightsRefusedError(f"{file}: cannot be read: {error}") from error


def _check_tensor(path: str, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor in the parameter's dtype. It stays in host memory until it is applied."""
    if tensor.shape != parameter.shape:
        raise WeightsRefusedError(
            f"{path}: {name} has shape {list(tensor.shape)}, the model has {list(parameter.shape)}"
        )
    if tensor.is_floating_point() != parameter.is_floating_point():
        raise WeightsRefusedError(f"{path}: {name} has dtype {tensor.dtype}, the model has {parameter.dtype}")
    tensor = tensor.to(parameter.dtype)
    if not torch.isfinite(tensor).all():
        raise WeightsRefusedError(f"{path}: {name} holds values that are not finite in {parameter.dtype}")
    return tensor


def _name_some(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
