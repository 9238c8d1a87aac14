"""New weights from a checkpoint directory straight into the model that serves: all of them, or none.

Two halves. `load_weights` reads and checks on any thread while the old weights go on serving; `apply_weights` copies on
the model's own thread and cannot fail half-way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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


def load_weights(target: TargetTensors, path: str) -> LoadedWeights:
    """Read a checkpoint in Hugging Face layout (safetensors, sharded or not) and check it against the model.

    Raises:
        WeightsRefusedError: no such directory, unreadable, tensors missing, unknown or of another shape, or values
            that are not finite in the model's dtype.
    """
    tensors = _read_files(_list_files(Path(path)))
    unknown = sorted(set(tensors) - set(target.by_name))
    if unknown:
        raise WeightsRefusedError(f"{path}: tensors unknown to this model: {_name_some(unknown)}")
    loaded = {}
    missing = []
    for parameter, names in target.groups():
        name = next((name for name in names if name in tensors), None)
        if name is None:
            missing.append(names[0])
        else:
            loaded[name] = _check_tensor(path, name, tensors[name], parameter)
    if missing:
        raise WeightsRefusedError(f"{path}: tensors missing: {_name_some(sorted(missing))}")
    return LoadedWeights(path, loaded)


def apply_weights(target: TargetTensors, weights: LoadedWeights) -> None:
    """Copy checked weights into the model."""
    with torch.no_grad():
        for name, tensor in weights.tensors.items():
            target.by_name[name].copy_(tensor)


def _list_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise WeightsRefusedError(f"{directory}: no such directory")
    index = directory / _INDEX_FILE
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(file.name for file in directory.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsRefusedError(f"{index}: not a safetensors index: {error!r}") from error
    if not names:
        raise WeightsRefusedError(f"{directory}: holds no safetensors file")
    return [directory / name for name in names]


def _read_files(files: list[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[name] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightsRefusedError(f"{file}: cannot be read: {error}") from error
    return tensors


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
