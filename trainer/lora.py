"""Low-rank adapters: added to a model in place, saved by themselves, and merged into plain weights for engines.

The adapters are peft's, put into the model without a wrapper around it, so that it still looks like itself. The base
weights are frozen. LoRA: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from everroll.contracts.spec import LoraSpec
from trainer.errors import CheckpointError

_TENSORS_NAME = "adapters.safetensors"
_ABOUT_NAME = "adapters.json"
_ADAPTER = "default"
_INFIXES = (".lora_A.", ".lora_B.")


def holds_adapters(directory: Path) -> bool:
    """Whether a checkpoint has adapters beside its model."""
    return (directory / _ABOUT_NAME).is_file()


def has_adapters(model: Any) -> bool:
    return any(_INFIXES[0] in name for name, _ in model.named_parameters())


def add_adapters(model: Any, directory: Path, spec: LoraSpec, seed: int) -> None:
    """Put adapters into a model: those that its checkpoint holds, or fresh ones (whose product is zero).

    Raises:
        CheckpointError: peft is not installed, no module has such a name, or the checkpoint's adapters are others.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise CheckpointError("train.lora needs the package peft: pip install 'everroll[lora]'") from error
    stored = _read_about(directory) if holds_adapters(directory) else None
    if stored is not None and stored != spec:
        raise CheckpointError(f"{directory}: its adapters are {stored!r}, not {spec!r}; train.lora cannot change")
    targets: Any = "all-linear" if spec.target_modules == ["all-linear"] else spec.target_modules
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise CheckpointError(f"train.lora.target_modules = {spec.target_modules}: {error}") from error
    if stored is not None:
        _load(model, load_file(directory / _TENSORS_NAME), directory)


def save_adapters(model: Any, directory: Path, spec: LoraSpec) -> None:
    """Write the adapters' tensors and what they are."""
    save_file({name: tensor.contiguous() for name, tensor in _adapter_state(model).items()}, directory / _TENSORS_NAME)
    (directory / _ABOUT_NAME).write_text(spec.model_dump_json(indent=1))


def merge_state(model: Any) -> dict[str, Tensor]:
    """The model's state as if it had no adapters, under the names that it had without them."""
    state = base_state(model)
    for name, layer in _adapted_layers(model):
        weight_name = f"{name}.weight"
        state[weight_name] = state[weight_name] + layer.get_delta_weight(_ADAPTER).detach()
    return state


def base_state(model: Any) -> dict[str, Tensor]:
    """The state of the model without adapters, under the names that it had without them."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict().items()
        if not any(infix in name for infix in _INFIXES)
    }


@contextlib.contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within, the model computes as it did before it had adapters."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _adapter_state(model: Any) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if any(infix in name for infix in _INFIXES)}


def _load(model: Any, tensors: dict[str, Tensor], directory: Path) -> None:
    own = _adapter_state(model)
    if own.keys() != tensors.keys():
        raise CheckpointError(f"{directory / _TENSORS_NAME} holds adapters of other modules than the model has")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _read_about(directory: Path) -> LoraSpec:
    try:
        return LoraSpec.model_validate_json((directory / _ABOUT_NAME).read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{directory / _ABOUT_NAME} cannot be read: {error}") from error
