"""Puts an engine together from its settings: model, caches, scheduler, core, application, server."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from tokenizers import Tokenizer

from everroll.engines.embedded.app import EngineApp, build_app
from everroll.engines.embedded.core import EngineCore
from everroll.engines.embedded.kv_cache import KvCache
from everroll.engines.embedded.model import CausalModel, load_model
from everroll.engines.embedded.prefix_cache import PrefixCache
from everroll.engines.embedded.runner import ModelRunner
from everroll.engines.embedded.scheduler import BatchLimits, Scheduler
from everroll.engines.embedded.selfcheck import check_model
from everroll.engines.embedded.server import EngineConfigurationError, EngineSettings
from everroll.engines.embedded.vllm_app import VllmApp
from everroll.engines.embedded.weights import TargetTensors, WeightsRefusedError, check_names
from everroll.engines.embedded.wire import ModelLimits, TextDecoder

_LOGGER = logging.getLogger(__name__)

BLOCK_TOKENS = 16
_GIB = 2**30
# Deterministic mode: rows per forward pass, and tokens per chunk of a prompt.
_TILE_ROWS = 16
_PREFILL_TILE_ROWS = 4
_TILE_TOKENS = 64


class EngineServer(uvicorn.Server):
    """Aborts what is in flight when it is told to stop, instead of waiting for long completions; exits normally."""

    def __init__(self, config: uvicorn.Config, core: EngineCore) -> None:
        super().__init__(config)
        self._core = core

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised once more: the process ends with exit code 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._core.stop()
        await super().shutdown(sockets)


def assemble_server(settings: EngineSettings, api_key: str | None) -> EngineServer:
    """Load the model, check it, and build the server around it.

    Raises:
        EngineConfigurationError: the caches cannot hold a single sequence.
        UnsupportedModelError: the model cannot be loaded, or not served correctly.
    """
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    device = _choose_device(settings.device)
    model = load_model(settings.model_path, device, _choose_dtype(settings.dtype, device))
    max_context = _choose_context(settings, model)
    limits = build_limits(settings, model, max_context)
    kv, prefix_cache = build_caches(settings, model, limits)
    runner = ModelRunner(model, kv, max_context)
    check_model(runner, limits)
    _warn_if_updates_cannot_work(model, settings.model_path)
    core = EngineCore(runner, Scheduler(limits, prefix_cache), settings.model_path, settings.weight_version)
    model_limits = ModelLimits(model.vocab_size, max_context, model.eos_token_ids)
    handlers = EngineApp(core, model_limits, load_decoder(settings.model_path), settings.max_queued_requests)
    config = uvicorn.Config(
        build_app(handlers, core, api_key, VllmApp(handlers).routes()),
        loop="auto",
        http="auto",
        lifespan="on",
        access_log=False,
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=10,
    )
    return EngineServer(config, core)


def build_limits(settings: EngineSettings, model: CausalModel, max_context: int) -> BatchLimits:
    """Batch shapes for this model within the memory that the settings allow."""
    max_kv_tokens = int(settings.kv_cache_gib * _GIB) // _bytes_per_token(model)
    if max_kv_tokens < max_context + _TILE_TOKENS:
        needed = (max_context + _TILE_TOKENS) * _bytes_per_token(model) / _GIB
        raise EngineConfigurationError(
            f"kv_cache_gib = {settings.kv_cache_gib:g} cannot hold one sequence of {max_context} tokens: "
            f"raise it to {needed:.2f}, or lower max_context_tokens"
        )
    if not settings.deterministic:
        chunk_tokens = settings.prefill_chunk_tokens
        return BatchLimits(settings.max_batch_size, max_context, max_kv_tokens, chunk_tokens=chunk_tokens)
    return BatchLimits(
        settings.max_batch_size,
        max_context,
        max_kv_tokens,
        key_step=_TILE_TOKENS,
        chunk_tokens=_TILE_TOKENS,
        decode_tile=_TILE_ROWS,
        prefill_tile=_PREFILL_TILE_ROWS,
    )


def build_caches(settings: EngineSettings, model: CausalModel, limits: BatchLimits) -> tuple[KvCache, PrefixCache]:
    """Rows and blocks for this model's keys and values, and the book of blocks."""
    num_blocks = int(settings.prefix_cache_gib * _GIB) // (_bytes_per_token(model) * BLOCK_TOKENS)
    kv = KvCache(
        model.layers,
        model.dtype,
        model.device,
        max_row_tokens=limits.max_kv_tokens,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
    )
    return kv, PrefixCache(num_blocks, BLOCK_TOKENS)


def _warn_if_updates_cannot_work(model: CausalModel, path: str) -> None:
    """Some architectures are stored under other names than their parameters have; say so now, not at step 1."""
    try:
        check_names(TargetTensors.of(model.module), path)
    except WeightsRefusedError as error:
        _LOGGER.warning("weight updates in the layout of this checkpoint will be refused: %s", error)


def load_decoder(model_path: str) -> TextDecoder | None:
    """The checkpoint's tokenizer, if it has one."""
    file = Path(model_path) / "tokenizer.json"
    if not file.exists():
        return None
    decoder: TextDecoder = Tokenizer.from_file(str(file))
    return decoder


def _bytes_per_token(model: CausalModel) -> int:
    return sum(layer.num_elements for layer in model.layers) * model.dtype.itemsize


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _choose_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """None keeps the checkpoint's."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name]


def _choose_context(settings: EngineSettings, model: CausalModel) -> int:
    most, wanted = model.max_positions, settings.max_context_tokens
    if most is None and wanted is None:
        raise EngineConfigurationError("the model names no longest context: set max_context_tokens")
    if most is not None and wanted is not None and wanted > most:
        raise EngineConfigurationError(f"max_context_tokens = {wanted}, but the model was made for {most}")
    return wanted if wanted is not None else most or 0
