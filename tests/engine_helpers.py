"""Tiny real models, a running embedded engine, and the plain Hugging Face forward pass that everything is held to."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from everroll.engines.embedded.core import EngineCore
from everroll.engines.embedded.server import EngineSettings, build_server, open_listener
from everroll.engines.http import EngineTimeouts, open_client_session
from everroll.engines.sglang import SGLangEngine

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
    target.mkdir()
    save_file(load_file(source / "model.safetensors") | changes, target / "model.safetensors", {"format": "pt"})
    return target


class Reference:
    """A plain forward pass over whole sequences: no batch, no cache of ours."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token of the completion."""
        logits_TV = self.model(input_ids=torch.tensor([prompt + completion])).logits[0]
        return _pick(logits_TV[len(prompt) - 1 : -1], completion, temperature)


@torch.no_grad()
def logprobs_after_update(old: Reference, new: Reference, computed: list[int], rest: list[int]) -> list[float]:
    """Log-probabilities of rest[1:] under the new weights, over keys and values that the old ones gave `computed`."""
    # The argument has been renamed in the course of transformers 5.
    name = "cache" if "cache" in inspect.signature(old.model.forward).parameters else "past_key_values"
    past = {name: DynamicCache(), "use_cache": True}
    old.model(input_ids=torch.tensor([computed]), **past)
    logits_TV = new.model(input_ids=torch.tensor([rest]), **past).logits[0]
    return _pick(logits_TV[:-1], rest[1:], 1.0)


def _pick(logits_TV: torch.Tensor, tokens: list[int], temperature: float) -> list[float]:
    logprobs_TV = torch.log_softmax(logits_TV.float() / temperature, dim=-1)
    return logprobs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


@contextmanager
def running_engine(checkpoint: Path, **settings: object) -> Iterator[str]:
    """The URL of an embedded engine on a free loopback port, in a thread of this process."""
    parsed = EngineSettings.model_validate(
        {"model_path": str(checkpoint), "port": 0, "prefix_cache_gib": 0.01, "num_threads": 1, **settings}
    )
    with open_listener(parsed) as listener:
        server = build_server(parsed, api_key=None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive(), "the engine did not start"
            assert time.monotonic() < deadline, "the engine does not start"
            time.sleep(0.002)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=60)
            assert not thread.is_alive(), "the engine did not stop"


class StepGate:
    """Holds an engine of this process still, with requests in the middle of their tokens.

    Once armed, the engine's thread takes `steps` steps with that many requests running, and then none until the gate
    is opened and a command (a pause, an update, an abort) wakes it: what happens next does not depend on time.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._count: int | None = None
        self._left = 0
        self._holding = threading.Event()
        step, has_work = EngineCore._step, EngineCore._has_work

        def counted_step(core: EngineCore) -> None:
            step(core)
            if self._count is not None and len(core._scheduler.running) >= self._count:
                self._left -= 1

        def gated_has_work(core: EngineCore) -> bool:
            if self._count is None or self._left > 0:
                return has_work(core)
            self._holding.set()
            return False

        patch.setattr(EngineCore, "_step", counted_step)
        patch.setattr(EngineCore, "_has_work", gated_has_work)

    def arm(self, count: int, steps: int = 20) -> None:
        self._holding.clear()
        self._count, self._left = count, steps

    async def open(self) -> None:
        """Wait until the engine stands still; it goes on with the next command."""
        assert await asyncio.to_thread(self._holding.wait, 60), "the engine did not get so far"
        self._count = None


@asynccontextmanager
async def engine_client(url: str, seconds: float = 60.0) -> AsyncIterator[SGLangEngine]:
    async with open_client_session() as session:
        yield SGLangEngine(url, session, timeouts=EngineTimeouts(5.0, seconds, seconds, seconds))


async def wait_for_info(
    url: str, wanted: Callable[[dict[str, Any]], bool], *, seconds: float = 60.0, api_key: str = ""
) -> dict[str, Any]:
    """Ask the engine for its state until it is as wanted."""
    deadline = time.monotonic() + seconds
    headers = {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=10)
    async with open_client_session() as session:
        while True:
            async with session.get(f"{url}/model_info", headers=headers, timeout=timeout) as response:
                info: dict[str, Any] = await response.json()
            if wanted(info):
                return info
            assert time.monotonic() < deadline, f"still {info}"
            await asyncio.sleep(0.005)
