"""The tiny model's supervised warm-up: cross-entropy on the assistant's tokens of demonstrations.

Shapes: B sequences in a batch, T tokens in the longest, N tokens with a loss, V tokens known, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.calculator.tools import TOOLS

IGNORED = -100
"""The target that cross-entropy leaves out."""
_RISING_STEPS = 10


class Encoded(NamedTuple):
    """A demonstration of T tokens."""

    token_ids: list[int]  # [T]
    is_sampled: list[bool]  # [T] True where the model would have sampled the token


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    num_steps: int = 180
    num_short_steps: int = 120
    """Of these, the steps without the system message."""
    batch_size: int = 16
    learning_rate: float = 4e-3


def build_renderer(tokenizer: PreTrainedTokenizerFast) -> Qwen3Renderer:
    """Qwen3's chat format without thinking, as `run.toml` asks for."""
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))


def encode_demonstration(renderer: Qwen3Renderer, opening: Sequence[int], messages: list[dict[str, Any]]) -> Encoded:
    """Render a conversation and find what the model would have sampled in it.

    `opening` is the empty thought that the format puts before each reply. It stands in the prompt, not in the
    completion, though the renderer counts it as the assistant's.
    """
    rendered = renderer.render(messages, tools=TOOLS)
    is_sampled = list(rendered.sampled_mask)
    for index in range(1, len(is_sampled)):
        if is_sampled[index] and not rendered.sampled_mask[index - 1]:
            is_sampled[index : index + len(opening)] = [False] * len(opening)
    return Encoded(list(rendered.token_ids), is_sampled)


def warm_up(model: Qwen3ForCausalLM, demonstrations: Sequence[Encoded], recipe: Recipe, seed: int) -> None:
    """Train in place; the learning rate rises over the first steps, then falls linearly to zero.

    All demonstrations begin with the same system message, nearly half of their tokens. Most steps leave it out, since
    what they teach, copying above all, depends on what comes after it; the last steps put it back.
    """
    rng = Random(seed)
    beginning = _count_common_tokens(demonstrations)
    short = [Encoded(ids[beginning:], is_sampled[beginning:]) for ids, is_sampled in demonstrations]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(recipe.num_steps):
        pool = short if step < recipe.num_short_steps else demonstrations
        rise, fall = (step + 1) / _RISING_STEPS, 1 - step / recipe.num_steps
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, rise) * fall
        loss = compute_loss(model, rng.sample(pool, recipe.batch_size))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _count_common_tokens(demonstrations: Sequence[Encoded]) -> int:
    """Tokens that all begin with."""
    columns = zip(*(encoded.token_ids for encoded in demonstrations), strict=False)
    return next(index for index, column in enumerate(columns) if len(set(column)) > 1)


def compute_loss(model: Qwen3ForCausalLM, batch: Sequence[Encoded]) -> torch.Tensor:
    """Cross-entropy per sampled token, in nats."""
    length = max(len(encoded.token_ids) for encoded in batch)
    token_ids_BT = torch.zeros(len(batch), length, dtype=torch.long)
    targets_BT = torch.full((len(batch), length), IGNORED)
    for row, (token_ids, is_sampled) in enumerate(batch):
        ids_T = torch.tensor(token_ids)
        token_ids_BT[row, : len(token_ids)] = ids_T
        targets_BT[row, : len(token_ids)] = ids_T.where(torch.tensor(is_sampled), IGNORED)
    # Padding stands on the right, where causal attention keeps it from being seen.
    hidden_BTD = model.model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    is_target_BT = targets_BT[:, 1:] != IGNORED
    logits_NV = model.lm_head(hidden_BTD[:, :-1][is_target_BT])
    return torch.nn.functional.cross_entropy(logits_NV, targets_BT[:, 1:][is_target_BT])
