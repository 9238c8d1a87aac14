"""What small real runs in tests have in common: a model with random weights, prompts, and a conversation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from transformers import Qwen3Config, Qwen3ForCausalLM

from everroll.agents import Episode
from tests.session_helpers import build_tokenizer, write_model_dir


def make_model(directory: Path, max_length: int = 512) -> None:
    """A checkpoint with random weights over the byte tokenizer's vocabulary; a turn takes milliseconds."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=build_tokenizer().get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
    )
    write_model_dir(directory)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def write_prompts(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"text": f"say {number}"}) + "\n" for number in range(count)))


async def converse(episode: Episode, client: AsyncOpenAI, num_turns: int) -> AsyncIterator[ChatCompletion]:
    """The answers of one conversation of so many turns, or fewer where one runs into its length."""
    messages: list[Any] = list(episode.prompt.messages)
    for turn in range(num_turns):
        answer = await client.chat.completions.create(model=episode.model, messages=messages)
        yield answer
        if answer.choices[0].finish_reason == "length":
            return
        reply = answer.choices[0].message.model_dump(exclude_none=True)
        messages += [reply, {"role": "user", "content": f"go on, {turn}"}]
