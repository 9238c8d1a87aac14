"""Before an engine serves, it proves on random tokens that its batching does not change what the model says.

The reference is a plain forward pass of the same model over each whole sequence, without our cache and masks.
"""

from __future__ import annotations

import torch

from everroll.engines.embedded.model import CausalModel, UnsupportedModelError
from everroll.engines.embedded.prefix_cache import PrefixCache
from everroll.engines.embedded.runner import ModelRunner
from everroll.engines.embedded.scheduler import BatchLimits, Scheduler
from everroll.engines.embedded.sequence import SamplingParams, Sequence

_LENGTHS = (1, 23, 90)
_NUM_DECODED = 3
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


@torch.inference_mode()
def check_model(runner: ModelRunner, limits: BatchLimits) -> None:
    """Compare a small batch with plain forward passes and, in deterministic mode, with each sequence run alone.

    Raises:
        UnsupportedModelError: the model does more with its past than keep keys and values per token, or (deterministic
            mode) this machine's arithmetic depends on the place in a batch.
    """
    prompts = _draw_prompts(runner.model.vocab_size, limits.max_context - _NUM_DECODED)
    batch = _run(runner, limits, [*prompts, *reversed(prompts)])
    for sequence in batch:
        _compare_with_reference(runner.model, sequence)
    if limits.decode_tile is not None:
        alone = [_run(runner, limits, [prompt])[0] for prompt in prompts]
        for one, other in zip([*alone, *reversed(alone)], batch, strict=True):
            if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs):
                raise UnsupportedModelError(
                    f"deterministic mode: {one.logprobs} alone, {other.logprobs} in a batch ({one.rid}); "
                    f"the arithmetic of {runner.model.device} in {runner.model.dtype} depends on the place in a batch"
                )


def _draw_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, longest) for length in _LENGTHS]
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _run(runner: ModelRunner, limits: BatchLimits, prompts: list[list[int]]) -> list[Sequence]:
    """Sample a few tokens for each prompt, in as many batches as it takes."""
    scheduler = Scheduler(limits, PrefixCache(0, 16))
    sequences = [
        Sequence(f"check of {len(prompt)} tokens", list(prompt), SamplingParams(max_new_tokens=_NUM_DECODED, seed=1))
        for prompt in prompts
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.num_unfinished:
        scheduler.admit()
        runner.kv.reserve(len(scheduler.running), scheduler.row_tokens())
        _finish_batch(runner, scheduler)
    runner.kv.shrink()
    return sequences


def _finish_batch(runner: ModelRunner, scheduler: Scheduler) -> None:
    while (prefill := scheduler.plan_prefill()) is not None:
        runner.prefill(prefill)
        scheduler.finish_prefill(prefill)
    for _ in range(_NUM_DECODED):
        for forward in scheduler.plan_decode():
            for sequence, token_id, logprob in zip(forward.sequences, *runner.decode(forward), strict=True):
                sequence.num_computed += 1
                sequence.append(token_id, logprob, 0)
    for sequence in list(scheduler.running):
        scheduler.remove(sequence)


def _compare_with_reference(model: CausalModel, sequence: Sequence) -> None:
    expected_TV = model.compute_reference_logprobs(sequence.token_ids)
    for index, logprob in enumerate(sequence.logprobs):
        position = sequence.num_prompt + index
        expected = float(expected_TV[position - 1, sequence.token_ids[position]])
        if not abs(logprob - expected) <= _TOLERANCE[model.dtype]:
            raise UnsupportedModelError(
                f"{type(model.module).__name__}: log-probability {logprob:.5f} in a batch, {expected:.5f} in a plain "
                f"forward pass (token {position} of a {sequence.rid}); this engine cannot serve it correctly"
            )
