"""What small real runs in tests have in common: a model with random weights, and prompts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

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
