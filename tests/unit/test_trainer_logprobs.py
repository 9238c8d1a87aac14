"""Log-probabilities, entropies and gradients over a chunk's logits in place, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trainer.logprobs
from trainer.logprobs import compute_token_logprobs

NUM_TOKENS, HIDDEN, VOCAB = 7, 5, 11


def _draw() -> tuple[torch.nn.Linear, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCAB).double()
    states_ND = 4 * torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.float64)
    target_ids_N = torch.randint(1, VOCAB, (NUM_TOKENS,))
    return head, states_ND, target_ids_N, 0.5 + torch.rand(NUM_TOKENS), torch.randn(NUM_TOKENS, dtype=torch.float64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk_tokens", [NUM_TOKENS, 3])
@pytest.mark.parametrize("block_tokens", [NUM_TOKENS, 2])
def test_values_and_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, block_tokens: int, chunk_tokens: int, masked: bool
) -> None:
    """Whatever the split; also where a model rules a token out, whose logit is minus infinity."""
    monkeypatch.setattr(trainer.logprobs, "MAX_CHUNK_ELEMENTS", chunk_tokens * VOCAB)
    monkeypatch.setattr(trainer.logprobs, "_CPU_BLOCK_ELEMENTS", block_tokens * VOCAB)
    head, states_ND, target_ids_N, temperatures_N, upstream_N = _draw()
    ruled_out_V = torch.zeros(VOCAB, dtype=torch.float64)
    ruled_out_V[0] = -torch.inf if masked else 0.0
    results = []
    for plain in (True, False):
        inputs_ND = states_ND.clone().requires_grad_()
        head.zero_grad()
        if plain:
            logits_NV = (head(inputs_ND) + ruled_out_V) / temperatures_N[:, None]
            logprobs_N = torch.log_softmax(logits_NV, -1)[torch.arange(NUM_TOKENS), target_ids_N]
            entropy_N = torch.distributions.Categorical(logits=logits_NV.detach()[:, int(masked) :]).entropy()
        else:
            outcome = compute_token_logprobs(
                lambda states: head(states) + ruled_out_V, inputs_ND, target_ids_N, temperatures_N, VOCAB
            )
            logprobs_N, entropy_N = outcome.logprobs_N, outcome.entropy_N
            assert not entropy_N.requires_grad
        logprobs_N.backward(upstream_N)  # type: ignore[no-untyped-call]
        results.append((logprobs_N.detach(), entropy_N, inputs_ND.grad, head.weight.grad.clone(), head.bias.grad))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_target_that_is_ruled_out_has_no_probability() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0]])
    outcome = compute_token_logprobs(torch.clone, logits, torch.tensor([0]), torch.ones(1), 3)
    assert outcome.logprobs_N.tolist() == [-torch.inf]
    assert float(outcome.entropy_N) == pytest.approx(0.582203)  # of the two that are left


def test_logits_that_are_not_numbers_are_not_hidden() -> None:
    """The step then fails on its gradient's norm, and says so."""
    outcome = compute_token_logprobs(
        torch.clone, torch.tensor([[torch.nan, 1.0]]), torch.tensor([1]), torch.ones(1), vocab_size=2
    )
    assert outcome.logprobs_N.isnan().all()


def test_a_second_backward_pass_is_refused() -> None:
    """The first has written the gradient over what it would need."""
    head, states_ND, target_ids_N, temperatures_N, upstream_N = _draw()
    logprobs_N = compute_token_logprobs(head, states_ND, target_ids_N, temperatures_N, VOCAB).logprobs_N
    logprobs_N.backward(upstream_N, retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="second backward pass"):
        logprobs_N.backward(upstream_N)  # type: ignore[no-untyped-call]
