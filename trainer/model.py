"""The policy: a Hugging Face causal LM with float32 master weights.

Shape suffixes: B samples, T positions, N sampled tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from everroll.contracts.spec import TrainSection
from trainer.errors import CheckpointError
from trainer.logprobs import TokenLogprobs, compute_token_logprobs
from trainer.microbatches import MicroBatch

_LOGGER = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DEFAULT_TOKENS = {"cpu": 2048}
_DEFAULT_TOKENS_ACCELERATOR = 16384


class Policy:
    """A causal LM that is trained. Dropout is off: what is trained is the distribution that was sampled from."""

    def __init__(self, model: Any, device: torch.device, train: TrainSection) -> None:
        self.model = model.to(device)
        self.device = device
        _own_parameters(self.model)
        _disable_dropout(self.model)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._has_plain_head = _check_plain_head(self.model, device)
        self.configure(train)

    def configure(self, train: TrainSection) -> None:
        """Take over settings that may change from step to step."""
        self._dtype = _DTYPES[train.dtype]
        if train.gradient_checkpointing:
            _enable_checkpointing(self.model)
        self.model.train(train.gradient_checkpointing)  # in evaluation mode, checkpointing is off

    @property
    def default_tokens_per_microbatch(self) -> int:
        return _DEFAULT_TOKENS.get(self.device.type, _DEFAULT_TOKENS_ACCELERATOR)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trainable parameters, in a fixed order; a shared one once."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def compute_logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        """Log-probabilities of the sampled tokens; carries gradient if that is enabled."""
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._has_plain_head:
                states = self.model.base_model(input_ids=batch.input_ids_BT, use_cache=False).last_hidden_state
                head: Callable[[Tensor], Tensor] = self.model.get_output_embeddings()
            else:
                states = self.model(input_ids=batch.input_ids_BT, use_cache=False).logits
                head = _identity
            states_ND = states.flatten(0, 1)[batch.positions_N]
            return compute_token_logprobs(head, states_ND, batch.target_ids_N, batch.temperatures_N, self.vocab_size)

    def save(self, directory: Path) -> None:
        """Write configuration and weights (float32) in Hugging Face layout."""
        with _quiet_transformers():
            self.model.save_pretrained(directory)


def load_policy(directory: Path, train: TrainSection) -> Policy:
    """Load a causal LM from a directory in Hugging Face layout.

    Raises:
        CheckpointError: it is no readable causal LM.
    """
    device = select_device(train.device)
    try:
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{directory} is no readable causal LM: {error}") from error
    return Policy(model, device, train)


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


def _identity(states: Tensor) -> Tensor:
    return states


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
