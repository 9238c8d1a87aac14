"""One GRPO step of the trainer against TRL's GRPO loss and a plain loop: same model, batch, loss and threads.

    python -m benchmarks.trainer --json
    python -m benchmarks.trainer --shape smollm2 --json

A step is forward and backward passes over the batch, the clipping of the gradient, and the optimizer's step; files are
neither read nor written. All contestants start from the same weights and samples, with the same advantages and weights
of tokens, the same AdamW and the same number of threads:

trainer  `trainer.step.apply_step`, as `train_step` calls it, its metrics included: samples end to end in one row,
         logits at the sampled positions only. `tokens_per_microbatch` is its own default (2,048) or `--microbatch`.
trl      TRL's `GRPOTrainer._compute_loss` (`benchmarks.trl_loss`), which pads prompts on the left and completions on
         the right, and computes logits for the completions; a backward pass after each `--batch-samples` samples. Left
         out where TRL is not installed.
plain    what one writes first: samples padded to the longest, an attention mask, logits at every position and a float32
         log-softmax over them; as many samples in a pass as TRL's.

No reward equals its group's mean, so that no contestant can leave a sample out: the trainer would do so. By default
`--shape smollm2` fits into one pass of each.

Each contestant is alone in a process of its own, one after the other; in every round the order is turned around. A
process loads the model, takes a step that warms up, and then `--steps` timed ones. Medians are over all timed steps of
all rounds. Memory is the highest resident size during the steps above what it was before the first: gradients, the
optimizer's state and activations; `process` is all that it held. Loss and gradient norm of the first step must agree,
or the command fails; as its ratios are 1, it is the norm that depends on the model.

CPU seconds are given too: they mean something also while other processes want the cores. Set OMP_WAIT_POLICY=PASSIVE
there, or threads that spin while they wait for each other are all that is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.trainer_contestants import CONTESTANTS, ContestantName, Measured, list_samples
from everroll.contracts.spec import ModelSection, TrainSection
from everroll.contracts.training import TrainRequest
from everroll.store import LocalStore
from tests.trainer_helpers import RUN, build_sample, store_episode, store_group
from trainer.batch import load_batch

_PROCESS_SECONDS = 1800


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and a batch that a step over it takes seconds for."""

    config: dict[str, int]
    groups: int
    members: int
    min_tokens: int
    max_tokens: int
    rounds: int
    steps: int


SHAPES = {
    "tiny": Shape(
        config={
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        groups=8,
        members=8,
        min_tokens=200,
        max_tokens=900,
        rounds=2,
        steps=4,
    ),
    "smollm2": Shape(  # SmolLM2-135M
        config={
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
        groups=1,
        members=4,
        min_tokens=100,
        max_tokens=300,
        rounds=2,
        steps=1,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    for name in ("groups", "members", "min-tokens", "max-tokens", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, help="default: the shape's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--microbatch", type=int, help="tokens per micro-batch (default: the trainer's choice)")
    parser.add_argument("--padding-free", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--batch-samples", type=int, default=8, help="samples in one pass of TRL and the plain loop")
    parser.add_argument("--files", action="store_true", help="also time what `train_step` reads and writes")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    for name in ("groups", "members", "min_tokens", "max_tokens", "rounds", "steps"):
        if vars(arguments)[name] is None:
            setattr(arguments, name, vars(SHAPES[arguments.shape])[name])
    results = run(arguments)
    for name, value in results.items():
        print(f"{name:28} {value}")
    if arguments.json:
        print(json.dumps(results))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that was measured, rounded.

    Raises:
        SystemExit: the contestants did not compute the same.
    """
    names = [name for name in CONTESTANTS if name != "trl" or importlib.util.find_spec("trl") is not None]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        request = write_setting(folder, arguments)
        samples = list_samples(load_batch(request, SHAPES[arguments.shape].config["vocab_size"]))
        measured: dict[ContestantName, list[Measured]] = {name: [] for name in names}
        for round_number in range(arguments.rounds):
            for name in names if round_number % 2 == 0 else names[::-1]:
                process = Measured.model_validate_json(run_process(folder, name, arguments))
                print(f"round {round_number + 1} {name}: {process.model_dump_json()}", file=sys.stderr, flush=True)
                measured[name].append(process)
        files = json.loads(run_process(folder, "files", arguments)) if arguments.files else None
    first = [process for processes in measured.values() for process in processes]
    compare(measured)
    results: dict[str, Any] = {
        "benchmark": "trainer",
        "shape": arguments.shape,
        "threads": arguments.threads,
        "samples": len(samples),
        "tokens": sum(sample.num_tokens for sample in samples),
        "sampled_tokens": sum(sample.num_sampled_tokens for sample in samples),
        "loss": first[0].loss,
        "grad_norm": first[0].grad_norm,
        "grad_norm_largest_deviation": float(f"{compute_deviation([process.grad_norm for process in first]):.1e}"),
    }
    results |= describe(measured, results["tokens"])
    return results if files is None else results | {"files_seconds": round(files["seconds"], 3)}


def run_process(folder: Path, name: str, arguments: argparse.Namespace) -> str:
    """The last line that a contestant prints."""
    command = [sys.executable, "-m", "benchmarks.trainer_contestants", str(folder), name]
    for option in ("steps", "threads", "batch_samples"):
        command += [f"--{option.replace('_', '-')}", str(vars(arguments)[option])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_PROCESS_SECONDS)
    return done.stdout.splitlines()[-1]


def write_setting(folder: Path, arguments: argparse.Namespace) -> TrainRequest:
    """Store a model with random weights, and a batch of random samples, half of whose tokens were sampled."""
    torch.manual_seed(0)
    config = SHAPES[arguments.shape].config
    LlamaForCausalLM(LlamaConfig(**config, max_position_embeddings=8192, tie_word_embeddings=True)).save_pretrained(
        folder / "model"
    )
    train = TrainSection(
        learning_rate=1e-5,
        device="cpu",
        importance_cap=0,  # TRL would need a pass of its own for it
        tokens_per_microbatch=arguments.microbatch,
        padding_free=arguments.padding_free,
    )
    rng = np.random.default_rng(0)
    store = LocalStore(folder / "store")
    items = []
    for group in range(arguments.groups):
        outcomes = []
        for member in range(arguments.members):
            length = int(rng.integers(arguments.min_tokens, arguments.max_tokens + 1))
            sample = build_sample(rng, length, num_prompt=length // 2, vocab_size=config["vocab_size"])
            outcomes.append(store_episode(store, group, member, float(rng.uniform()), [sample]))
        items.append(store_group(store, group, outcomes))
    request = TrainRequest(
        run=RUN,
        run_dir=str(folder / "run"),
        step=1,
        seed=0,
        store_url=str(folder / "store"),
        batch=items,
        model=ModelSection(path=str(folder / "model")),
        train=train,
    )
    (folder / "request.json").write_text(request.model_dump_json())
    return request


def compare(measured: dict[ContestantName, list[Measured]]) -> None:
    """Raises SystemExit unless loss and gradient norm agree. The loss is near 0, as the sum of advantages is."""
    everyone = [process for processes in measured.values() for process in processes]
    losses, norms = [process.loss for process in everyone], [process.grad_norm for process in everyone]
    if max(losses) - min(losses) > 1e-5 or compute_deviation(norms) > 1e-4:
        seen = {name: [(process.loss, process.grad_norm) for process in parts] for name, parts in measured.items()}
        raise SystemExit(f"the contestants computed different losses and gradient norms: {seen}")


def compute_deviation(values: Sequence[float]) -> float:
    """Largest difference, relative to the largest value."""
    return (max(values) - min(values)) / max(abs(value) for value in values)


def describe(measured: dict[ContestantName, list[Measured]], num_tokens: int) -> dict[str, Any]:
    """Medians over the timed steps of all processes; of memory, over processes."""
    wall = {name: statistics.median(t for p in parts for t in p.wall_seconds) for name, parts in measured.items()}
    cpu = {name: statistics.median(t for p in parts for t in p.cpu_seconds) for name, parts in measured.items()}
    results: dict[str, Any] = {}
    for name, processes in measured.items():
        results[f"{name}_tokens_per_second"] = round(num_tokens / wall[name])
        results[f"{name}_seconds"] = round(wall[name], 3)
        results[f"{name}_cpu_seconds"] = round(cpu[name], 3)
        results[f"{name}_peak_mib"] = round(statistics.median(process.peak_mib for process in processes))
        results[f"{name}_process_mib"] = round(statistics.median(process.process_mib for process in processes))
        if name != "trainer":
            results[f"speedup_over_{name}"] = round(wall[name] / wall["trainer"], 2)
            results[f"cpu_speedup_over_{name}"] = round(cpu[name] / cpu["trainer"], 2)
    return results


if __name__ == "__main__":
    main()
