"""Forward passes of planned batches, without a server: what is in a batch is decided here, not by timing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everroll.engines.embedded.kv_cache import KvCache
from everroll.engines.embedded.model import load_model
from everroll.engines.embedded.prefix_cache import PrefixCache
from everroll.engines.embedded.runner import ModelRunner
from everroll.engines.embedded.scheduler import BatchLimits, Scheduler
from everroll.engines.embedded.sequence import SamplingParams, Sequence
from tests.engine_helpers import MAX_CONTEXT, VOCAB_SIZE, Reference, make_checkpoint

BLOCK = 16


def run_to_decode(runner: ModelRunner, scheduler: Scheduler, prompts: list[list[int]]) -> list[Sequence]:
    """Admit prompts together, prefill them together, and sample one token for each."""
    sequences = [Sequence("r", list(prompt), SamplingParams(max_new_tokens=1, seed=1)) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    admitted = scheduler.admit()
    assert [item.sequence for item in admitted] == sequences
    runner.kv.reserve(len(scheduler.running), scheduler.row_tokens())
    for item in admitted:
        if item.blocks:
            runner.kv.load_blocks(item.sequence.row, item.blocks)
    while (prefill := scheduler.plan_prefill()) is not None:
        runner.prefill(prefill)
        for sequence, pairs in scheduler.finish_prefill(prefill):
            if pairs:
                runner.kv.store_blocks(sequence.row, pairs)
    (forward,) = scheduler.plan_decode()
    for sequence, token_id, logprob in zip(forward.sequences, *runner.decode(forward), strict=True):
        sequence.num_computed += 1
        sequence.append(token_id, logprob, 0)
    for sequence in sequences:
        scheduler.remove(sequence)
    return sequences


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_padding_may_reach_past_the_end_of_a_row(architecture: str, tmp_path: Path) -> None:
    """A prompt that is cached but for its end, next to one that is not cached: the padding of the first overshoots."""
    checkpoint = make_checkpoint(tmp_path / "model", architecture)
    model = load_model(str(checkpoint), torch.device("cpu"), torch.float32)
    kv = KvCache(
        model.layers, model.dtype, model.device, max_row_tokens=2 * MAX_CONTEXT, num_blocks=64, block_tokens=BLOCK
    )
    runner = ModelRunner(model, kv, MAX_CONTEXT)
    scheduler = Scheduler(BatchLimits(4, MAX_CONTEXT, 2 * MAX_CONTEXT), PrefixCache(64, BLOCK))
    known = [index % VOCAB_SIZE for index in range(MAX_CONTEXT - 1)]
    other = [(index * 7 + 3) % VOCAB_SIZE for index in range(400)]
    run_to_decode(runner, scheduler, [known])
    sequences = run_to_decode(runner, scheduler, [known, other])
    assert sequences[0].num_cached == 496
    assert sequences[0].num_cached + len(other) - 1 > kv.room
    reference = Reference(checkpoint)
    for sequence, prompt in zip(sequences, [known, other], strict=True):
        assert sequence.logprobs == pytest.approx(reference.logprobs(prompt, sequence.new_token_ids), abs=1e-4)
