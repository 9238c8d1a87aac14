"""Draws are reproducible, independent of the batch, and follow the distribution they claim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from everroll.engines.embedded.sampler import Draw, compute_uniforms, sample
from everroll.engines.embedded.sequence import SamplingParams

VOCAB = 31


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draws(count: int, index: int = 0, **params: float) -> list[Draw]:
    return [Draw(SamplingParams(max_new_tokens=1, seed=seed, **params), index) for seed in range(count)]  # type: ignore[arg-type]


def test_uniforms_are_uniform_and_differ_by_seed_and_index() -> None:
    numbers = np.concatenate([compute_uniforms(draws(200, index=index)) for index in range(50)])
    assert len(np.unique(numbers)) == numbers.size
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 43.8  # the 99.9th percentile at 19 degrees of freedom


def test_seeds_beyond_64_bits_and_negative_ones_are_accepted() -> None:
    params = [SamplingParams(max_new_tokens=1, seed=seed) for seed in (-1, 2**64 - 1, 2**70)]
    numbers = compute_uniforms([Draw(one, 0) for one in params])
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    count = 20_000
    logits = random_logits(1)
    tokens, logprobs = sample(logits.expand(count, -1), draws(count, temperature=temperature))
    expected = torch.log_softmax(logits[0] / temperature, dim=-1)
    assert logprobs == expected[tokens].tolist()
    observed = np.bincount(tokens, minlength=VOCAB)
    wanted = expected.exp().numpy().astype(np.float64) * count
    likely = wanted > 5
    chi_square = ((observed - wanted) ** 2 / wanted)[likely].sum()
    assert chi_square < likely.sum() + 4 * math.sqrt(2 * likely.sum())


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = random_logits(8)
    together = sample(logits, draws(8))
    for row, draw in enumerate(draws(8)):
        alone = sample(logits[row : row + 1], [draw])
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])


def test_top_k_and_top_p_cut_the_tail_but_not_the_logprobs() -> None:
    count = 2000
    logits = random_logits(1, seed=3)
    expected = torch.log_softmax(logits[0], dim=-1)
    order = expected.argsort(descending=True).tolist()
    mass = expected.exp()[order].cumsum(0)
    nucleus = order[: int((mass < 0.6).sum()) + 1]
    for params, allowed in (({"top_k": 3}, order[:3]), ({"top_p": 0.6}, nucleus), ({"top_p": 1e-9}, order[:1])):
        tokens, logprobs = sample(logits.expand(count, -1), draws(count, **params))
        assert set(tokens) == set(allowed)
        assert logprobs == expected[tokens].tolist()


def test_mixed_rows_keep_their_own_rules() -> None:
    logits = random_logits(1).expand(3, -1)
    best = int(logits[0].argmax())
    rows = [
        Draw(SamplingParams(max_new_tokens=1, temperature=0, seed=1), 0),
        Draw(SamplingParams(max_new_tokens=1, top_k=1, temperature=3.0, seed=2), 0),
        Draw(SamplingParams(max_new_tokens=1, temperature=0.5, seed=3), 0),
    ]
    tokens, logprobs = sample(logits, rows)
    assert tokens[:2] == [best, best]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits[0], -1)[best]), abs=1e-6)
    assert logprobs[1] == pytest.approx(float(torch.log_softmax(logits[0] / 3, -1)[best]), abs=1e-6)


def test_logits_that_are_not_finite_give_no_finite_logprob() -> None:
    logits = random_logits(2)
    logits[0, 5] = float("nan")
    _, logprobs = sample(logits, draws(2))
    assert math.isnan(logprobs[0])
    assert math.isfinite(logprobs[1])


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((500, VOCAB), float("-inf"))
    logits[:, 7] = 0.0
    tokens, logprobs = sample(logits, draws(500))
    assert set(tokens) == {7}
    assert set(logprobs) == {0.0}
