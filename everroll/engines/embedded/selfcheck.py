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
    """Prefill and decode a few sequences of different lengths, and compare log-probabilities with the reference.

    Raises:
        UnsupportedModelError: they differ: the model does more with its past than keys and values per token.
    """
    model = runner.model
    generator = torch.Generator().manual_seed(0)
    scheduler = Scheduler(limits, PrefixCache(0, 16))
    longest = limits.max_context - _NUM_DECODED
    for length in (min(length, longest) for length in _LENGTHS):
        tokens = torch.randint(model.vocab_size, (length,), generator=generator).tolist()
        scheduler.add(Sequence(f"check-{length}", tokens, SamplingParams(max_new_tokens=_NUM_DECODED)))
    scheduler.admit()
    runner.kv.reserve(len(scheduler.running), scheduler.row_tokens())
    while (prefill := scheduler.plan_prefill()) is not None:
        runner.prefill(prefill)
        scheduler.finish_prefill(prefill)
    for _ in range(_NUM_DECODED):
        for forward in scheduler.plan_decode():
            for sequence, token_id, logprob in zip(forward.sequences, *runner.decode(forward), strict=True):
                sequence.num_computed += 1
                sequence.append(token_id, logprob, 0)
    for sequence in scheduler.running:
        _compare(model, sequence)
    runner.kv.shrink()


def _compare(model: CausalModel, sequence: Sequence) -> None:
    expected_TV = model.compute_reference_logprobs(sequence.token_ids)
    for index, logprob in enumerate(sequence.logprobs):
        position = sequence.num_prompt + index
        expected = float(expected_TV[position - 1, sequence.token_ids[position]])
        if not abs(logprob - expected) <= _TOLERANCE[model.dtype]:
            raise UnsupportedModelError(
                f"{type(model.module).__name__}: log-probability {logprob:.5f} in a batch, {expected:.5f} in a plain "
                f"forward pass (token {position} of {sequence.rid}); this engine cannot serve it correctly"
            )
