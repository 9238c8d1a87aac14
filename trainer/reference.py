"""The reference model of the optional KL term: frozen, and run without gradient, so that it keeps no graph.

With adapters the reference is the policy itself with its adapters off, and costs no memory. Otherwise it is a second
model: the one that `train.kl_reference` names, or the one that the run started from.

Shape suffixes: N sampled tokens of a micro-batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from everroll.contracts.spec import LoraSpec
from everroll.contracts.training import TrainRequest
from trainer.errors import CheckpointError
from trainer.microbatches import MicroBatch
from trainer.model import Policy, load_policy


class Reference(Protocol):
    """What the policy is held close to."""

    def compute_logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probabilities of the sampled tokens, [N], float32, without gradient."""


class AdaptersOff:
    """The policy as it was before it had adapters."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def compute_logprobs(self, micro: MicroBatch) -> Tensor:
        return self._policy.compute_base_logprobs(micro)


class FrozenModel:
    """A second model in memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._policy.model.requires_grad_(False)

    def compute_logprobs(self, micro: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self._policy.compute_logprobs(micro).logprobs_N


def load_reference(policy: Policy, request: TrainRequest) -> Reference | None:
    """The reference of a policy; None if `train.kl_coef` is 0.

    Raises:
        CheckpointError: it cannot be loaded, or does not fit the policy.
    """
    if request.train.kl_coef == 0:
        return None
    if policy.has_adapters:
        return AdaptersOff(policy)
    path = Path(request.train.kl_reference or request.model.path)
    layout = "on" if policy.packed else "off"
    update = {"lora": LoraSpec(), "padding_free": layout, "gradient_checkpointing": False}
    reference = load_policy(path, request.train.model_copy(update=update))
    if reference.vocab_size != policy.vocab_size:
        raise CheckpointError(
            f"the reference {path} has a vocabulary of {reference.vocab_size}, the policy one of {policy.vocab_size}"
        )
    return FrozenModel(reference)
