"""One GRPO step of the trainer against TRL's GRPO loss and a plain loop: same model, batch, loss and threads, one run.

    python -m benchmarks.trainer --json
    python -m benchmarks.trainer --shape smollm2 --groups 2 --members 4 --min-tokens 200 --max-tokens 700 --json

TRL runs its own trainer's `_compute_loss`, then a backward pass, as many times as there are micro-batches, and the same
optimizer step (`benchmarks.trl_loss`; without TRL it is left out). The plain loop is what one writes first: groups in
order, padded to the longest sample, an attention mask, logits for every position and a float32 log-softmax over them.
Rounds alternate, and the medians are compared. All include the optimizer's step; none reads or writes files. The whole
`train_step`, files included, is timed as well. Memory is the peak of a process of its own for each, above what it held
before the step.

CPU seconds are given too: they mean something also while other processes want the cores. Set OMP_WAIT_POLICY=PASSIVE
there, or threads that spin while they wait for each other are all that is measured.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.trl_loss import build_trl_inputs, build_trl_trainer
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
    # SmolLM2-135M, with random weights.
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

CONTESTANTS = ("trainer", "trl", "plain")
HAS_TRL = importlib.util.find_spec("trl") is not None


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
    parser.add_argument("--padding-free", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--batch-samples", type=int, default=8, help="samples in one pass of TRL and the plain loop")
    parser.add_argument("--memory-of", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments)))
        return
    results = run(arguments) | {
        f"{name}_peak_mib": run_for_memory(name) for name in CONTESTANTS if name != "trl" or HAS_TRL
    }
    for name, value in results.items():
        print(f"{name:28} {value}")
    if arguments.json:
        print(json.dumps(results))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements of time of one run, rounded."""
    with tempfile.TemporaryDirectory() as folder:
        setting = build_setting(Path(folder), arguments)
        contestants = {name: Contestant(setting, name) for name in CONTESTANTS if name != "trl" or HAS_TRL}
        times: dict[str, list[Times]] = {name: [] for name in contestants}
        largest_difference = 0.0
        for round_number in range(arguments.rounds + 1):  # the first one warms up
            losses = {}
            for name, contestant in contestants.items():
                measured, losses[name] = contestant.time()
                if round_number > 0:
                    times[name].append(measured)
            if round_number == 0:  # later the models differ by what rounding made of them
                largest_difference = max(losses.values()) - min(losses.values())
        whole_seconds = time_whole_step(setting.request)
        packed = contestants["trainer"].state.policy.packed
    num_tokens = sum(sample.num_tokens for sample in list_samples(setting.batch))
    medians = {name: _compute_medians(values) for name, values in times.items()}
    wall, cpu = medians["trainer"]
    results: dict[str, Any] = {
        "benchmark": "trainer",
        "shape": arguments.shape,
        "threads": arguments.threads,
        "samples": len(list_samples(setting.batch)),
        "tokens": num_tokens,
        "padding_free": packed,
    }
    for name, (its_wall, its_cpu) in medians.items():
        results[f"{name}_seconds"] = round(its_wall, 3)
        results[f"{name}_cpu_seconds"] = round(its_cpu, 3)
        results[f"{name}_tokens_per_second"] = round(num_tokens / its_wall)
        if name != "trainer":
            results[f"speedup_over_{name}"] = round(its_wall / wall, 2)
            results[f"cpu_speedup_over_{name}"] = round(its_cpu / cpu, 2)
    return results | {
        "whole_step_seconds": round(whole_seconds, 3),
        "files_seconds": round(whole_seconds - wall, 3),
        "loss_difference": float(f"{largest_difference:.2e}"),
    }


def run_for_memory(name: str) -> float:
    """MiB, from a process of its own with this one's arguments."""
    command = [sys.executable, "-m", "benchmarks.trainer", *sys.argv[1:], "--memory-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure_memory(arguments: argparse.Namespace) -> float:
    """Peak MiB of this process during two steps, above what it held before."""
    with tempfile.TemporaryDirectory() as folder:
        contestant = Contestant(build_setting(Path(folder), arguments), arguments.memory_of)
        before = _read_status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        contestant.time()
        contestant.time()
        return round(_read_status("VmHWM") - before, 1)


def _read_status(field: str) -> float:
    """MiB; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field))


@dataclass(frozen=True)
class Setting:
    """What all contestants share."""

    model: Any
    train: TrainSection
    request: TrainRequest
    batch: TrainingBatch
    folder: Path
    batch_samples: int


def build_setting(folder: Path, arguments: argparse.Namespace) -> Setting:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[arguments.shape], max_position_embeddings=8192, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    train = TrainSection(
        learning_rate=1e-5,
        device="cpu",
        importance_cap=0,  # TRL would need a pass of its own for it
        tokens_per_microbatch=arguments.microbatch,
        padding_free=arguments.padding_free,
    )
    model.save_pretrained(folder / "model")
    request = build_request(folder, train, arguments)
    batch = load_batch(request, SHAPES[arguments.shape]["vocab_size"])
    return Setting(model, train, request, batch, folder, arguments.batch_samples)


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

    def __init__(self, setting: Setting, name: str) -> None:
        self._setting = setting
        self._name = name
        # Only the trainer's own model attends as the trainer wants; the others keep what transformers gives them.
        train = setting.train if name == "trainer" else setting.train.model_copy(update={"padding_free": "off"})
        model = copy.deepcopy(setting.model)
        attention = model.config._attn_implementation
        policy = Policy(model, torch.device("cpu"), train)
        if name != "trainer":
            model.set_attn_implementation(attention)
        self.state = LoadedState(policy, build_optimizer(policy, train), version=0)
        self._trl = build_trl_trainer(model, train, setting.folder / "trl") if name == "trl" else None
        if self._trl is not None:
            self._trl.model.eval()

    def time(self) -> tuple[Times, float]:
        """Times and loss of one step."""
        started = _read_clocks()
        loss = self._step_trainer() if self._name == "trainer" else self._step_other()
        return _read_clocks(started), loss

    def _step_trainer(self) -> float:
        return apply_step(self.state, self._setting.batch, self._setting.request, lambda text: None)["loss"]

    def _step_other(self) -> float:
        rows = build_rows(self._setting.batch.groups, self._setting.train)
        num_items = sum(row.sample.num_sampled_tokens for row in rows)
        self.state.optimizer.zero_grad()
        loss = 0.0
        for start in range(0, len(rows), self._setting.batch_samples):
            part = rows[start : start + self._setting.batch_samples]
            if self._trl is None:
                part_loss = compute_plain_loss(self.state.policy.model, part)
            else:
                part_loss = self._trl._compute_loss(self._trl.model, build_trl_inputs(part, num_items))
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += float(part_loss.detach())
        torch.nn.utils.clip_grad_norm_(self.state.policy.model.parameters(), 1.0)
        self.state.optimizer.step()
        return loss


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
