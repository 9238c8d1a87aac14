"""One GRPO step of the trainer against a plain loop: same model, batch, loss and threads, in one run.

    python -m benchmarks.trainer --json

The plain loop is what one writes first: groups in order, padded to the longest sample, an attention mask, logits for
every position and a float32 log-softmax over all of them. Rounds alternate, and the medians are compared. Both include
the optimizer's step; neither reads or writes files. The whole `train_step`, files included, is timed as well.

CPU seconds are given too: they mean something also while other processes want the cores. Set OMP_WAIT_POLICY=PASSIVE
there, or threads that spin while they wait for each other are all that is measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from everroll.contracts.spec import ModelSection, TrainSection
from everroll.contracts.training import PrepareTrainerRequest, TrainRequest
from everroll.store import LocalStore
from everroll.tokens.samples import Sample
from tests.trainer_helpers import RUN, build_sample, store_episode, store_group
from trainer.batch import TrainingBatch, load_batch
from trainer.checkpoint import LoadedState
from trainer.microbatches import Row, build_rows
from trainer.model import Policy
from trainer.optimizer import build_optimizer
from trainer.service import Trainer
from trainer.step import apply_step

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    # The shapes of SmolLM2-135M, with Qwen3's layers and random weights.
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--min-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=900)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--microbatch", type=int, help="tokens per micro-batch (default: the trainer's choice)")
    parser.add_argument("--plain-samples", type=int, default=8, help="samples in one pass of the plain loop")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = run(arguments)
    for name, value in results.items():
        print(f"{name:28} {value}")
    if arguments.json:
        print(json.dumps(results))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one run, rounded."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(**SHAPES[arguments.shape], max_position_embeddings=8192, tie_word_embeddings=True)
    )
    train = TrainSection(learning_rate=1e-4, device="cpu", tokens_per_microbatch=arguments.microbatch)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model.save_pretrained(root / "model")
        request = build_request(root, train, arguments)
        batch = load_batch(request, SHAPES[arguments.shape]["vocab_size"])
        ours, plain = Contestant(model, train), Contestant(model, train)
        ours_times: list[Times] = []
        plain_times: list[Times] = []
        losses = []
        for round_number in range(arguments.rounds + 1):  # the first one warms up
            times, loss = ours.time_trainer(batch, request)
            times_plain, loss_plain = plain.time_plain(batch, train, arguments.plain_samples)
            losses.append(abs(loss - loss_plain))
            if round_number > 0:
                ours_times.append(times)
                plain_times.append(times_plain)
        whole_seconds = time_whole_step(request)
    num_tokens = sum(sample.num_tokens for sample in list_samples(batch))
    median, cpu = _compute_medians(ours_times)
    median_plain, cpu_plain = _compute_medians(plain_times)
    return {
        "benchmark": "trainer",
        "shape": arguments.shape,
        "threads": arguments.threads,
        "samples": len(list_samples(batch)),
        "tokens": num_tokens,
        "trainer_seconds": round(median, 3),
        "trainer_tokens_per_second": round(num_tokens / median),
        "trainer_cpu_seconds": round(cpu, 3),
        "plain_cpu_seconds": round(cpu_plain, 3),
        "plain_seconds": round(median_plain, 3),
        "plain_tokens_per_second": round(num_tokens / median_plain),
        "speedup": round(median_plain / median, 2),
        "cpu_speedup": round(cpu_plain / cpu, 2),
        "whole_step_seconds": round(whole_seconds, 3),
        "files_seconds": round(whole_seconds - median, 3),
        "largest_loss_difference": float(f"{max(losses):.2e}"),
    }


def build_request(root: Path, train: TrainSection, arguments: argparse.Namespace) -> TrainRequest:
    """Store a batch of random samples, half of whose tokens were sampled."""
    rng = np.random.default_rng(0)
    store = LocalStore(root / "store")
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    items = []
    for group in range(arguments.groups):
        outcomes = []
        for member in range(arguments.members):
            length = int(rng.integers(arguments.min_tokens, arguments.max_tokens + 1))
            sample = build_sample(rng, length, num_prompt=length // 2, vocab_size=vocab_size)
            outcomes.append(store_episode(store, group, member, float(rng.integers(0, 3)), [sample]))
        items.append(store_group(store, group, outcomes))
    return TrainRequest(
        run=RUN,
        run_dir=str(root / "run"),
        step=1,
        seed=0,
        store_url=str(root / "store"),
        batch=items,
        model=ModelSection(path=str(root / "model")),
        train=train,
    )


Times = tuple[float, float]
"""Wall and CPU seconds."""


def _read_clocks(since: Times = (0.0, 0.0)) -> Times:
    return time.perf_counter() - since[0], time.process_time() - since[1]


def _compute_medians(times: Sequence[Times]) -> Times:
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


class Contestant:
    """A copy of the model with an optimizer of its own."""

    def __init__(self, model: Any, train: TrainSection) -> None:
        policy = Policy(copy.deepcopy(model), torch.device("cpu"), train)
        self.state = LoadedState(policy, build_optimizer(policy, train), version=0)

    def time_trainer(self, batch: TrainingBatch, request: TrainRequest) -> tuple[Times, float]:
        """Times and loss of one step of the trainer."""
        started = _read_clocks()
        metrics = apply_step(self.state, batch, request, lambda text: None)
        return _read_clocks(started), metrics["loss"]

    def time_plain(self, batch: TrainingBatch, train: TrainSection, num_samples: int) -> tuple[Times, float]:
        """Times and loss of one step of the plain loop."""
        started = _read_clocks()
        rows = build_rows(batch.groups, train)
        self.state.optimizer.zero_grad()
        loss = 0.0
        for start in range(0, len(rows), num_samples):
            part_loss = compute_plain_loss(self.state.policy.model, rows[start : start + num_samples])
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
        torch.nn.utils.clip_grad_norm_(self.state.policy.model.parameters(), 1.0)
        self.state.optimizer.step()
        return _read_clocks(started), loss


def compute_plain_loss(model: Any, rows: Sequence[Row]) -> Tensor:
    """Clipped surrogate with truncated importance correction, over padded [B, T] arrays."""
    ids_BT = pad_sequence([torch.tensor(row.sample.token_ids, dtype=torch.int64) for row in rows], batch_first=True)
    real_BT = pad_sequence([torch.ones(row.sample.num_tokens, dtype=torch.int64) for row in rows], batch_first=True)
    mask_BT = pad_sequence([torch.tensor(row.sample.loss_mask) for row in rows], batch_first=True)[:, 1:].float()
    sampler_BT = pad_sequence([torch.tensor(row.sample.sampler_logprobs) for row in rows], batch_first=True)[:, 1:]
    advantages_B1 = torch.tensor([row.advantage for row in rows])[:, None]
    weights_B1 = torch.tensor([row.token_weight for row in rows])[:, None]
    logits_BTV = model(input_ids=ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1].float()
    logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    ratio_BT = torch.exp(logprobs_BT - logprobs_BT.detach())
    bounded_BT = ratio_BT.clamp(0.8, 1.2)
    importance_BT = torch.exp(logprobs_BT.detach() - sampler_BT).clamp_max(2.0)
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, bounded_BT * advantages_B1)
    return (weights_B1 * importance_BT * loss_BT * mask_BT).sum()


def time_whole_step(request: TrainRequest) -> float:
    """Seconds of `train_step` with checkpoint and weights written, after one that warms up."""
    trainer = Trainer()
    trainer.prepare(
        PrepareTrainerRequest(
            run=request.run, run_dir=request.run_dir, seed=request.seed, model=request.model, train=request.train
        )
    )
    trainer.train_step(request, lambda text: None)
    started = time.perf_counter()
    trainer.train_step(request.model_copy(update={"step": 2}), lambda text: None)
    seconds = time.perf_counter() - started
    trainer.close()
    return seconds


def list_samples(batch: TrainingBatch) -> list[Sample]:
    return [sample for group in batch.groups for episode in group.episodes for sample in episode.samples]


if __name__ == "__main__":
    main()
