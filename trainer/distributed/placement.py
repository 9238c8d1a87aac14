"""How a policy lies on the processes that train it, and what a step must do differently for it.

alone      one process has it all
ddp        every process has it all and computes a share of the samples; gradients are summed
fsdp       every process has a part of each parameter, its gradient and its optimizer state (`fully_shard`)

Sums run over processes in an order that differs from one process's, so results agree within rounding, not bit for bit;
with the same number of processes they are equal bit for bit on CPU.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.distributed.sharing import Pass, Split, plan_passes
from trainer.logprobs import TokenLogprobs
from trainer.microbatches import MicroBatch, Row
from trainer.model import Policy

Forward = Callable[[MicroBatch], TokenLogprobs]
_BUCKET_ELEMENTS = 1 << 24
"""Gradients are summed over processes in pieces of up to 64 MiB."""


class Placement:
    """One process has it all. The others derive from this."""

    rank = 0
    size = 1
    is_sharded = False
    """Whether a process has only a part of each parameter. Then all make equally many passes."""
    loss_scale = 1.0
    """Factor on the loss before the backward pass."""

    def place(self, policy: Policy) -> Forward:
        """Lay out a policy that was loaded whole; returns how log-probabilities are computed from now on.

        Call before an optimizer is made over its parameters.
        """
        return policy.compute_logprobs

    def plan(self, rows: Sequence[Row], split: Split) -> list[Pass]:
        """This process's passes over the rows of an update."""
        return plan_passes(rows, split, self.rank, self.size, equally_many=self.is_sharded)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make every process's gradients those of all samples."""

    def clip_gradients(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        """Clip the global norm; returns what it was."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        return [value]

    def whole(self, policy: Policy) -> Policy:
        """A policy that rank 0 can save: this one, or a copy with all of its parameters. All processes call it."""
        return policy

    def lay_out(self, tensors: Mapping[str, Tensor], policy: Policy) -> dict[str, Tensor]:
        """Whole tensors, named after parameters, as this process holds those."""
        return dict(tensors)


ALONE = Placement()


class DataParallel(Placement):
    """Every process has the whole policy; samples are shared out and gradients summed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """A parameter that has no gradient on any process keeps none, so that the optimizer leaves it alone."""
        if not parameters:
            return
        has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        has_gradient = has_gradient.to(parameters[0].device)
        dist.all_reduce(has_gradient)
        taking_part = [parameter for parameter, used in zip(parameters, has_gradient.tolist(), strict=True) if used]
        for bucket in _build_buckets(taking_part):
            _sum_bucket(bucket)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


class Sharded(DataParallel):
    """Fully sharded: each block of the model is gathered for its turn in a pass, and dropped again."""

    is_sharded = True

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size)
        self.loss_scale = float(size)  # `fully_shard` averages gradients over processes, where a sum is wanted
        self._mesh: DeviceMesh = init_device_mesh(device.type, (size,))
        self._whole: Policy | None = None

    def place(self, policy: Policy) -> Forward:
        if self.rank == 0:
            self._whole = copy.deepcopy(policy)
            self._whole.model.to("cpu")
        for block in _find_blocks(policy.model):
            fully_shard(block, mesh=self._mesh)
        root = _LogprobsModule(policy)
        # The root holds embeddings, head and norms, and keeps them gathered from forward to backward pass.
        fully_shard(root, mesh=self._mesh)
        return root.compute

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """The backward pass has done it."""

    def whole(self, policy: Policy) -> Policy:
        """Rank 0's copy on the CPU, brought up to date."""
        targets = {} if self._whole is None else dict(self._whole.named_parameters())
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                if targets:
                    targets[name].copy_(tensor)
        if self._whole is None:
            return policy
        self._whole.publish_dtype = policy.publish_dtype
        return self._whole

    def lay_out(self, tensors: Mapping[str, Tensor], policy: Policy) -> dict[str, Tensor]:
        parameters = dict(policy.named_parameters())
        laid_out = {}
        for name, tensor in tensors.items():
            parameter: Tensor | None = parameters.get(name.rpartition(".")[0])
            if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
                whole = tensor.to(parameter.device)
                # Every process has read the whole tensor and takes its own part; nothing is sent.
                tensor = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            laid_out[name] = tensor
        return laid_out


def build_placement(kind: Literal["ddp", "fsdp"], rank: int, size: int, device: torch.device) -> Placement:
    """`ddp` or `fsdp` over the default process group; one process needs neither."""
    if size == 1:
        return ALONE
    return DataParallel(rank, size) if kind == "ddp" else Sharded(rank, size, device)


class _LogprobsModule(nn.Module):
    """The policy's computation as one module, whose call `fully_shard` surrounds with gathering."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """A tuple, because `fully_shard` looks for the tensors that carry gradient in what is returned."""
        outcome = self._policy.compute_logprobs(batch)
        return outcome.logprobs_N, outcome.entropy_N

    def compute(self, batch: MicroBatch) -> TokenLogprobs:
        """Between passes, every process holds its part only.

        A pass with gradient ends so by itself, after its backward pass; one without would leave the root gathered, and
        the next pass would then not see what the optimizer has done to the parts.
        """
        outcome = TokenLogprobs(*self(batch))
        if isinstance(self, FSDPModule) and not torch.is_grad_enabled():
            self.reshard()
        return outcome


def _find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists: a transformer's layers."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _find_blocks(child)


def _build_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one type, small enough to be copied into one buffer."""
    for _, same_type in itertools.groupby(parameters, key=lambda parameter: parameter.dtype):
        bucket: list[nn.Parameter] = []
        for parameter in same_type:
            if bucket and sum(item.numel() for item in bucket) + parameter.numel() > _BUCKET_ELEMENTS:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


def _sum_bucket(bucket: Sequence[nn.Parameter]) -> None:
    gradients = [torch.zeros_like(item) if item.grad is None else item.grad for item in bucket]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for parameter, summed in zip(bucket, torch.split(flat, [item.numel() for item in bucket]), strict=True):
        parameter.grad = summed.view_as(parameter).clone()
