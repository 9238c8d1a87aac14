"""The policy: a Hugging Face causal LM with float32 master weights.

Shape suffixes: B samples, T positions, N sampled tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from everroll.contracts.spec import TrainSection
from trainer import lora
from trainer.errors import CheckpointError
from trainer.logprobs import TokenLogprobs, compute_token_logprobs
from trainer.microbatches import MicroBatch
from trainer.packed_attention import enable_packing

_LOGGER = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DEFAULT_TOKENS = {"cpu": 2048}
_DEFAULT_TOKENS_ACCELERATOR = 16384


class Policy:
    """A causal LM that is trained. Dropout is off: what is trained is the distribution that was sampled from."""

    def __init__(self, model: Any, device: torch.device, train: TrainSection, model_dtype: str = "float32") -> None:
        """`model_dtype` is what the starting checkpoint's configuration names, for `publish_dtype = "model"`."""
        self.model = model.to(device)
        self.device = device
        self._lora = train.lora
        self.model_dtype = model_dtype
        _own_parameters(self.model)
        _disable_dropout(self.model)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._has_plain_head = _check_plain_head(self.model, device)
        self._packing_obstacle = enable_packing(self.model, device)
        self.configure(train)

    def configure(self, train: TrainSection) -> None:
        """Take over settings that may change from step to step.

        Raises:
            CheckpointError: `padding_free = "on"`, and the model does not allow it.
        """
        self._dtype = _DTYPES[train.dtype]
        self.publish_dtype = self.model_dtype if train.publish_dtype == "model" else train.publish_dtype
        if train.padding_free == "on" and self._packing_obstacle is not None:
            raise CheckpointError(
                f'train.padding_free = "on": {type(self.model).__name__} does not allow it: {self._packing_obstacle}'
            )
        self.packed = train.padding_free != "off" and self._packing_obstacle is None
        if train.gradient_checkpointing:
            _enable_checkpointing(self.model)
        self.model.train(train.gradient_checkpointing)  # in evaluation mode, checkpointing is off

    @property
    def default_tokens_per_microbatch(self) -> int:
        return _DEFAULT_TOKENS.get(self.device.type, _DEFAULT_TOKENS_ACCELERATOR)

    @property
    def has_adapters(self) -> bool:
        return lora.has_adapters(self.model)

    @property
    def weights_are_masters(self) -> bool:
        """Whether what is published is all that a checkpoint needs."""
        return self.publish_dtype == "float32" and not self.has_adapters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters, in a fixed order; a shared one once."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def compute_logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        """Log-probabilities of the sampled tokens; carries gradient if that is enabled."""
        arguments = {} if batch.packing is None else batch.packing.model_arguments()
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._has_plain_head:
                base = self.model.base_model
                states = base(input_ids=batch.input_ids_BT, use_cache=False, **arguments).last_hidden_state
                head: Callable[[Tensor], Tensor] = self.model.get_output_embeddings()
            else:
                states = self.model(input_ids=batch.input_ids_BT, use_cache=False, **arguments).logits
                head = torch.clone
            states_ND = states.flatten(0, 1)[batch.positions_N]
            return compute_token_logprobs(head, states_ND, batch.target_ids_N, batch.temperatures_N, self.vocab_size)

    def compute_base_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the model without its adapters, without gradient."""
        with torch.no_grad(), lora.adapters_off(self.model):
            return self.compute_logprobs(batch).logprobs_N

    def save(self, directory: Path) -> None:
        """Write what engines load, in Hugging Face layout: adapters merged, in `publish_dtype`."""
        state = lora.merge_state(self.model) if self.has_adapters else self.model.state_dict()
        _save(self.model, directory, _cast(state, _DTYPES[self.publish_dtype]), self.publish_dtype)

    def save_masters(self, directory: Path) -> None:
        """Write what a checkpoint needs where the published weights are not enough: float32, or the adapters alone."""
        if self.has_adapters:
            lora.save_adapters(self.model, directory, self._lora)
        else:
            _save(self.model, directory, self.model.state_dict(), self.publish_dtype)

    def save_base(self, directory: Path) -> None:
        """Write the model without its adapters, in float32."""
        _save(self.model, directory, lora.base_state(self.model), self.publish_dtype)


def load_policy(directory: Path, train: TrainSection, seed: int = 0, model_dtype: str | None = None) -> Policy:
    """Load a causal LM from a directory in Hugging Face layout.

    `model_dtype` is the type that the configuration of the run's starting model names; None if this is that model.
    With `train.lora.rank` above 0 it has adapters: those of the directory, or fresh ones, random by `seed`.

    Raises:
        CheckpointError: it is no readable causal LM, or its adapters are of another rank or missing.
    """
    device = select_device(train.device)
    model = load_model(directory)
    if train.lora.rank > 0 or lora.holds_adapters(directory):
        _own_parameters(model)
        lora.add_adapters(model, directory, train.lora, seed)
    return Policy(model, device, train, model_dtype or _read_dtype(directory))


def load_model(directory: Path) -> Any:
    """A causal LM in float32, as transformers has it.

    Raises:
        CheckpointError: it is no readable causal LM.
    """
    try:
        with _quiet_transformers():
            return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{directory} is no readable causal LM: {error}") from error


def _save(model: Any, directory: Path, state: dict[str, Tensor], dtype: str) -> None:
    """In the configuration stands the type to load in, which is that of the published weights."""
    with _quiet_transformers():
        model.save_pretrained(directory, state_dict=state)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")


def _cast(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in another type; tied ones stay tied, or they would be written twice."""
    cast: dict[int, Tensor] = {}
    for tensor in state.values():
        if tensor.data_ptr() not in cast:
            cast[tensor.data_ptr()] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return {name: cast[tensor.data_ptr()] for name, tensor in state.items()}


def _read_dtype(directory: Path) -> str:
    """The type that a checkpoint's configuration names; float32 if it names none that can be published."""
    config = json.loads((directory / "config.json").read_text())
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def select_device(name: str) -> torch.device:
    """`auto` is the first accelerator, or the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _own_parameters(model: nn.Module) -> None:
    """Copy every parameter and buffer into memory of its own.

    Loaded ones point into the file at any alignment, on which the rounding of matrix products can depend: a model that
    was reloaded would then differ in its last bits from one that was not.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _disable_dropout(model: nn.Module) -> None:
    """Modules keep their rates as attributes; the configuration, which is saved again, stays as it is."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _enable_checkpointing(model: Any) -> None:
    """transformers 5 renamed the method and warns about the old name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _check_plain_head(model: Any, device: torch.device) -> bool:
    """Whether logits are no more than the output layer over the last hidden state.

    Some families scale or cap them. Asked of the model itself rather than of a list of families; where it does not
    hold, the model's own logits are used, at the price of computing them for every position.
    """
    input_ids_BT = torch.arange(8, device=device)[None] % model.get_output_embeddings().weight.shape[0]
    model.eval()
    with torch.no_grad():
        wanted_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
        states_BTD = model.base_model(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        plain = torch.allclose(model.get_output_embeddings()(states_BTD), wanted_BTV, rtol=1e-4, atol=1e-5)
    if not plain:
        _LOGGER.info("%s post-processes its logits; they are computed for all positions", type(model).__name__)
    return plain


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without progress bars: a worker's standard error is a log."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
