"""One contestant of `benchmarks.trainer`, in this process alone: what its steps take, in time and memory.

    python -m benchmarks.trainer_contestants FOLDER trl --steps 2 --threads 2 --batch-samples 8

`FOLDER` holds `request.json`, a `TrainRequest` whose model and samples lie there too. Prints one JSON object. Started
by `benchmarks.trainer`, which says what each contestant does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.trl_loss import build_trl_inputs, build_trl_trainer
from everroll.contracts.training import PrepareTrainerRequest, TrainRequest
from everroll.tokens.samples import Sample
from trainer.batch import TrainingBatch, load_batch
from trainer.checkpoint import LoadedState
from trainer.microbatches import Row, build_rows
from trainer.model import Policy, load_model, load_policy
from trainer.optimizer import build_adamw, build_optimizer
from trainer.service import Trainer
from trainer.step import apply_step

ContestantName = Literal["trainer", "trl", "plain"]
CONTESTANTS: tuple[ContestantName, ...] = ("trainer", "trl", "plain")


class Measured(BaseModel):
    """What one process has measured. All steps are over the same batch; the first one warms up."""

    loss: float
    """Of the first step, from the same weights in every contestant."""
    grad_norm: float
    """Of the first step, before clipping."""
    wall_seconds: list[float]
    """Of the steps after the first."""
    cpu_seconds: list[float]
    peak_mib: float
    """Resident memory at its highest during all steps, above what it was with the model loaded."""
    process_mib: float
    """The same with all that the process held before: model, libraries."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=[*CONTESTANTS, "files"])
    parser.add_argument("--steps", type=int, required=True, help="timed ones")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-samples", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    request = TrainRequest.model_validate_json((arguments.folder / "request.json").read_bytes())
    if arguments.name == "files":
        print(json.dumps({"seconds": time_files(request)}))
        return
    print(measure(build_contestant(arguments, request), arguments.steps).model_dump_json())


class TrainerContestant:
    """The trainer's own step."""

    def __init__(self, request: TrainRequest) -> None:
        policy = load_policy(Path(request.model.path), request.train)
        self._state = LoadedState(policy, build_optimizer(policy, request.train), version=0)
        self._batch = _load(request, policy.vocab_size)
        self._request = request

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        metrics = apply_step(self._state, self._batch, self._request, lambda text: None)
        return metrics["loss"], metrics["grad_norm"]


class PaddedContestant:
    """A loss over so many samples at a time, padded; then the optimizer."""

    def __init__(self, request: TrainRequest, batch_samples: int) -> None:
        model = load_model(Path(request.model.path))
        attention = model.config._attn_implementation
        # Memory of its own for every parameter, as the trainer's model has it; attention as transformers gives it.
        policy = Policy(model, torch.device("cpu"), request.train.model_copy(update={"padding_free": "off"}))
        model.set_attn_implementation(attention)
        self.model: Any = model
        self.rows = build_rows(_load(request, policy.vocab_size).groups, request.train)
        self.num_sampled_tokens = sum(row.sample.num_sampled_tokens for row in self.rows)
        self._parameters: list[nn.Parameter] = list(model.parameters())
        self._optimizer = build_adamw(self._parameters, request.train)
        self._max_grad_norm = request.train.max_grad_norm
        self._batch_samples = batch_samples

    def compute_loss(self, rows: Sequence[Row]) -> Tensor:
        """The share of these samples in the update's loss: what one writes first."""
        return compute_plain_loss(self.model, rows)

    def step(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        self._optimizer.zero_grad()
        loss = 0.0
        for start in range(0, len(self.rows), self._batch_samples):
            part_loss = self.compute_loss(self.rows[start : start + self._batch_samples])
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
        norm = nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._optimizer.step()
        return loss, float(norm)


class TrlContestant(PaddedContestant):
    """TRL's own trainer computes the loss."""

    def __init__(self, request: TrainRequest, batch_samples: int) -> None:
        super().__init__(request, batch_samples)
        self._trl = build_trl_trainer(self.model, request.train, Path(request.run_dir) / "trl")
        self._trl.model.eval()

    def compute_loss(self, rows: Sequence[Row]) -> Tensor:
        loss: Tensor = self._trl._compute_loss(self._trl.model, build_trl_inputs(rows, self.num_sampled_tokens))
        return loss


def build_contestant(arguments: argparse.Namespace, request: TrainRequest) -> TrainerContestant | PaddedContestant:
    if arguments.name == "trainer":
        return TrainerContestant(request)
    kind = TrlContestant if arguments.name == "trl" else PaddedContestant
    return kind(request, arguments.batch_samples)


def measure(contestant: TrainerContestant | PaddedContestant, num_steps: int) -> Measured:
    """One step that warms up, and allocates gradients and the optimizer's state; then the timed ones."""
    before = _read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    loss, grad_norm = contestant.step()
    wall, cpu = [], []
    for _ in range(num_steps):
        started = time.perf_counter(), time.process_time()
        contestant.step()
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    peak = _read_status("VmHWM")
    return Measured(
        loss=loss, grad_norm=grad_norm, wall_seconds=wall, cpu_seconds=cpu, peak_mib=peak - before, process_mib=peak
    )


def _read_status(field: str) -> float:
    """MiB; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def compute_plain_loss(model: Any, rows: Sequence[Row]) -> Tensor:
    """Clipped surrogate over padded [B, T] arrays."""
    ids_BT = pad_sequence([torch.tensor(row.sample.token_ids, dtype=torch.int64) for row in rows], batch_first=True)
    real_BT = pad_sequence([torch.ones(row.sample.num_tokens, dtype=torch.int64) for row in rows], batch_first=True)
    mask_BT = pad_sequence([torch.tensor(row.sample.loss_mask) for row in rows], batch_first=True)[:, 1:].float()
    advantages_B1 = torch.tensor([row.advantage for row in rows])[:, None]
    weights_B1 = torch.tensor([row.token_weight for row in rows])[:, None]
    logits_BTV = model(input_ids=ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1].float()
    logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    ratio_BT = torch.exp(logprobs_BT - logprobs_BT.detach())
    bounded_BT = ratio_BT.clamp(0.8, 1.2)
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, bounded_BT * advantages_B1)
    return (weights_B1 * loss_BT * mask_BT).sum()


def time_files(request: TrainRequest) -> float:
    """Seconds of `train_step` outside the step itself: batch read, weights and checkpoint written. The second step's,
    after one that warms up.
    """
    trainer = Trainer()
    trainer.prepare(
        PrepareTrainerRequest(
            run=request.run, run_dir=request.run_dir, seed=request.seed, model=request.model, train=request.train
        )
    )
    trainer.train_step(request, lambda text: None)
    started = time.perf_counter()
    result = trainer.train_step(request.model_copy(update={"step": 2}), lambda text: None)
    seconds = time.perf_counter() - started - result.metrics["update_seconds"]
    trainer.close()
    return seconds


def list_samples(batch: TrainingBatch) -> list[Sample]:
    return [sample for group in batch.groups for episode in group.episodes for sample in episode.samples]


def _load(request: TrainRequest, vocab_size: int) -> TrainingBatch:
    return load_batch(request, vocab_size)


if __name__ == "__main__":
    main()
