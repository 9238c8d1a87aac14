"""Make the tiny model and its prompts: `python -m examples.calculator.make --out DIR --seed N`.

Writes `DIR/model`, a checkpoint in Hugging Face layout, and `DIR/prompts.jsonl`. Equal seeds give equal bytes on the
same machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.calculator.task import draw_demonstrations, draw_problems
from examples.calculator.tokenizer import train_tokenizer
from examples.calculator.tools import TOOLS
from examples.calculator.warmup import Recipe, build_renderer, encode_demonstration, warm_up

NUM_PROMPTS = 480
NUM_DEMONSTRATIONS = 840
VOCAB_SIZE = 640
DEFAULT_RECIPE = Recipe()


def make(out: Path, seed: int, recipe: Recipe = DEFAULT_RECIPE) -> None:
    """Write the checkpoint and the prompts into `out`."""
    rng = Random(seed)
    demonstrations = draw_demonstrations(rng, NUM_DEMONSTRATIONS)
    tokenizer = build_tokenizer(demonstrations[:100])
    renderer = build_renderer(tokenizer)
    opening = tokenizer.encode("<think>\n\n</think>\n\n")
    encoded = [encode_demonstration(renderer, opening, messages) for messages in demonstrations]
    model = build_model(tokenizer, seed)
    with one_thread():
        warm_up(model, encoded, recipe, seed)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    write_prompts(out / "prompts.jsonl", rng)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: so small a model gains little from more, and loses much on a busy machine.

    It also makes the order of sums, and so the weights, the same whatever the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_tokenizer(demonstrations: list[list[dict[str, Any]]]) -> PreTrainedTokenizerFast:
    """A vocabulary learned from whole rendered conversations, so that the fixed parts become few tokens."""
    plain = train_tokenizer([])
    renderer = build_renderer(plain)
    texts = [plain.decode(renderer.render(messages, tools=TOOLS).token_ids) for messages in demonstrations]
    return train_tokenizer(texts, VOCAB_SIZE)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        # Turning faster than in large models: the distances that matter here are short.
        rope_theta=30.0,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def write_prompts(path: Path, rng: Random) -> None:
    """Write `NUM_PROMPTS` problems as JSON lines."""
    lines = [json.dumps(problem.to_prompt()) for problem in draw_problems(rng, NUM_PROMPTS)]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    make(options.out, options.seed)
    print(f"made {options.out / 'model'} and {options.out / 'prompts.jsonl'} in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
