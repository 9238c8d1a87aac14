"""One training step: a validated batch applied to a policy, as one or several optimizer updates.

Everything here is a function of the state, the batch and the request: the order is fixed, and random numbers are
seeded from the run's seed and the step. Nothing is written.

Shape suffixes: N sampled tokens of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from everroll.contracts.outcomes import TrainingError
from everroll.contracts.spec import TrainSection
from everroll.contracts.training import TrainRequest
from trainer.batch import TrainingBatch
from trainer.checkpoint import LoadedState
from trainer.distributed.placement import Placement
from trainer.losses import PolicyLoss, compute_policy_loss
from trainer.metrics import MetricSums, PhaseClock, describe_rows, read_peak_memory, reset_peak_memory
from trainer.microbatches import MicroBatch, Row, build_microbatch, build_rows, split_rows
from trainer.model import Policy
from trainer.optimizer import configure_optimizer
from trainer.reference import load_reference

Progress = Callable[[str], None]


class Update:
    """One optimizer update: its micro-batches, and the constant log-probabilities that its ratios are taken against."""

    def __init__(self, rows: Sequence[Row], policy: Policy, train: TrainSection, placement: Placement) -> None:
        budget = train.tokens_per_microbatch or policy.default_tokens_per_microbatch

        def split(part: Sequence[Row]) -> list[list[Row]]:
            return split_rows(part, budget, policy.packed)

        self.rows = rows
        """Those of all processes; the micro-batches are this one's."""
        moving = [row for row in rows if row.advantage != 0.0 or train.kl_coef > 0.0]
        idle = [row for row in rows if row.advantage == 0.0 and train.kl_coef == 0.0]
        self.has_gradient = bool(moving)
        """On any process."""
        passes = placement.plan(moving, split)
        self.num_with_gradient = len(passes)
        """The first micro-batches; the rest have no advantage, hence no gradient, and are only measured."""
        passes += placement.plan(idle, split)
        self.microbatches = [build_microbatch(item.rows, policy.packed).to(policy.device) for item in passes]
        self.counts = [item.counts for item in passes]
        """Whether a micro-batch is measured."""
        self.old_logprobs_N: list[Tensor] | None = None
        """One tensor per micro-batch; None while they equal the current policy's."""


def apply_step(
    state: LoadedState, batch: TrainingBatch, request: TrainRequest, on_progress: Progress
) -> dict[str, float]:
    """Turn version `step - 1` into `step` in place, and return the step's metrics.

    The state is of no use after an exception: parameters may be half updated.

    Raises:
        TrainingError: the gradient is not finite.
    """
    started = time.perf_counter()
    train = request.train
    torch.manual_seed(request.seed * 1_000_003 + request.step)
    state.policy.configure(train)
    learning_rate = configure_optimizer(state.optimizer, train, request.step)
    updates = _build_updates(state, batch, train)
    sums = MetricSums()
    phases = PhaseClock(state.policy.device)
    reset_peak_memory(state.policy.device)
    with phases.measure("old_logprobs"):
        _fix_old_logprobs(state, updates, train, on_progress)
    with phases.measure("reference"):
        if state.reference is None:
            state.reference = load_reference(state.policy, request)
    grad_norms = []
    for number, update in enumerate(updates, start=1):
        name = f"step {request.step} update {number}/{len(updates)}"
        grad_norms.append(_apply_update(state, update, train, sums, phases, name, on_progress))
    state.version = request.step
    sums = MetricSums.merge(state.placement.gather(sums))
    seconds = time.perf_counter() - started
    rows = [row for update in updates for row in update.rows]
    num_tokens = sum(row.sample.num_tokens for row in rows)
    return {
        **sums.compute(num_updates=len(updates)),
        **describe_rows(rows, [reward for group in batch.groups for reward in group.rewards]),
        "grad_norm": sum(grad_norms) / len(grad_norms),
        "learning_rate": learning_rate,
        "num_microbatches": float(sum(len(update.microbatches) for update in updates)),
        "update_seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "peak_memory_bytes": read_peak_memory(state.policy.device),
        **phases.compute(),
    }


def _build_updates(state: LoadedState, batch: TrainingBatch, train: TrainSection) -> list[Update]:
    """Equal runs of consecutive groups, one per optimizer update."""
    size = len(batch.groups) // train.num_minibatches
    return [
        Update(build_rows(batch.groups[start : start + size], train), state.policy, train, state.placement)
        for start in range(0, len(batch.groups), size)
    ]


def _fix_old_logprobs(
    state: LoadedState, updates: Sequence[Update], train: TrainSection, on_progress: Progress
) -> None:
    """Settle what ratios are taken against, before the first update changes the policy.

    The first update needs no pass of its own: its old log-probabilities are those of its own forward pass.
    """
    if train.old_logprobs == "sampler":
        for update in updates:
            update.old_logprobs_N = [micro.sampler_logprobs_N for micro in update.microbatches]
        return
    for number, update in enumerate(updates[1:], start=2):
        old_logprobs_N = []
        for micro in update.microbatches:
            on_progress(f"old log-probabilities of update {number}/{len(updates)}")
            with torch.no_grad():
                old_logprobs_N.append(state.compute_logprobs(micro).logprobs_N)
        update.old_logprobs_N = old_logprobs_N


def _apply_update(
    state: LoadedState,
    update: Update,
    train: TrainSection,
    sums: MetricSums,
    phases: PhaseClock,
    name: str,
    on_progress: Progress,
) -> float:
    """Accumulate the gradient over all micro-batches, then step once. Returns the gradient's norm before clipping."""
    state.optimizer.zero_grad(set_to_none=True)
    for index, micro in enumerate(update.microbatches):
        on_progress(f"{name} micro-batch {index + 1}/{len(update.microbatches)}")
        old_N = None if update.old_logprobs_N is None else update.old_logprobs_N[index]
        with phases.measure("reference"):
            reference_N = None if state.reference is None else state.reference.compute_logprobs(micro)
        with phases.measure("gradient"), torch.set_grad_enabled(index < update.num_with_gradient):
            outcome = _accumulate(state, micro, old_N, reference_N, train)
        if update.counts[index]:
            sums.add(micro, *outcome)
    parameters = [parameter for _, parameter in state.policy.named_parameters()]
    if update.has_gradient:
        state.placement.sum_gradients(parameters)
    else:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # AdamW's momentum goes on, as it would after a zero gradient
    limit = train.max_grad_norm if train.max_grad_norm > 0 else float("inf")
    with phases.measure("optimizer"):
        grad_norm = state.placement.clip_gradients(parameters, limit)
        if not torch.isfinite(torch.tensor(grad_norm)):
            raise TrainingError(f"{name}: the gradient's norm is {grad_norm}; nothing was applied")
        state.optimizer.step()
    return grad_norm


def _accumulate(
    state: LoadedState,
    micro: MicroBatch,
    old_logprobs_N: Tensor | None,
    reference_logprobs_N: Tensor | None,
    train: TrainSection,
) -> tuple[PolicyLoss, Tensor, Tensor]:
    """One pass; returns what is measured: the loss, the trainer's log-probabilities, and the entropies."""
    current = state.compute_logprobs(micro)
    old_N = current.logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N
    outcome = compute_policy_loss(train, micro, current.logprobs_N, old_N, reference_logprobs_N)
    if torch.is_grad_enabled():
        (outcome.loss * state.placement.loss_scale).backward()  # type: ignore[no-untyped-call]
    trainer_N = old_N if train.old_logprobs == "trainer" else current.logprobs_N.detach()
    return outcome, trainer_N, current.entropy_N
