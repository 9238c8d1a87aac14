"""Tiny real models, a running embedded engine, and the plain Hugging Face forward pass that everything is held to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

from everroll.engines.embedded.server import EngineSettings, build_server, open_listener

VOCAB_SIZE = 97
MAX_CONTEXT = 512


def tiny_config(architecture: str) -> PretrainedConfig:
    """Two layers of 32 units; a context of 512 tokens."""
    common = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llama_like = {
        **common,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
    }
    if architecture == "qwen3":
        return Qwen3Config(**llama_like, head_dim=8, tie_word_embeddings=True)
    if architecture == "llama":
        return LlamaConfig(**llama_like, tie_word_embeddings=False)
    if architecture == "mistral":
        return MistralConfig(**llama_like, sliding_window=24)
    if architecture == "qwen3_sliding":
        layer_types = ["full_attention", "sliding_attention"]
        return Qwen3Config(
            **llama_like, head_dim=8, use_sliding_window=True, sliding_window=24, layer_types=layer_types
        )
    if architecture == "gpt2":
        return GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_CONTEXT)
    raise ValueError(architecture)


def make_checkpoint(directory: Path, architecture: str = "qwen3", seed: int = 0) -> Path:
    """A model with random weights from a seed, large enough for peaked distributions."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    model.save_pretrained(directory)
    return directory


def change_checkpoint(source: Path, target: Path, changes: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint's weights in which some tensors are replaced."""
    from safetensors.torch import load_file

    target.mkdir()
    save_file(load_file(source / "model.safetensors") | changes, target / "model.safetensors", {"format": "pt"})
    return target


class Reference:
    """A plain forward pass over whole sequences: no cache, no batch."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token of the completion."""
        tokens = torch.tensor([prompt + completion])
        logprobs_TV = torch.log_softmax(self._model(input_ids=tokens).logits[0].float() / temperature, dim=-1)
        first = len(prompt) - 1
        return [float(logprobs_TV[first + index, token]) for index, token in enumerate(completion)]


@dataclass(frozen=True)
class RunningEngine:
    url: str
    checkpoint: Path


@contextmanager
def running_engine(checkpoint: Path, **settings: object) -> Iterator[RunningEngine]:
    """An embedded engine on a free loopback port, in a thread of this process."""
    torch.set_num_threads(1)
    parsed = EngineSettings.model_validate(
        {"model_path": str(checkpoint), "port": 0, "prefix_cache_gib": 0.01, "num_threads": 1, **settings}
    )
    with open_listener(parsed) as listener:
        server = build_server(parsed, api_key=None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        try:
            yield RunningEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", checkpoint)
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive(), "the engine did not stop"
