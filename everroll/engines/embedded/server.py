"""`everroll engine`: settings, assembly and the serving process. Torch is imported when serving begins, not before."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from everroll.contracts.base import Spec
from everroll.engines.base import API_KEY_VARIABLE

if TYPE_CHECKING:
    from uvicorn import Server

_LOGGER = logging.getLogger(__name__)


class EngineSettings(Spec):
    """How an embedded engine serves a model."""

    model_path: str
    """Checkpoint directory in Hugging Face layout; a tokenizer is needed only for the text in answers."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs an API key in EVERROLL_ENGINE_API_KEY."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8820
    """Port to listen on; 0 takes a free one and logs it."""
    device: str = "auto"
    """`auto` (CUDA if there is any, else CPU), `cpu`, `cuda`, `cuda:0`, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and of keys and values; `auto` is float32 on CPU and the checkpoint's elsewhere."""
    max_batch_size: Annotated[int, Field(ge=1)] = 128
    """Most requests in one decode step; the others queue."""
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest sequence, prompt and completion together; left out, what the model was made for."""
    max_queued_requests: Annotated[int, Field(ge=1)] = 4096
    """Requests beyond this many, running ones included, are aborted at once."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 4.0
    """Most memory for keys and values of running requests; used as it is needed."""
    prefix_cache_gib: Annotated[float, Field(ge=0)] = 0.5
    """Memory for keys and values kept for later prompts that begin alike; 0 keeps none."""
    prefill_chunk_tokens: Annotated[int, Field(ge=16)] = 1024
    """Most tokens of one prompt computed between two decode steps; deterministic mode has its own."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of torch on CPU; left out, torch decides."""
    deterministic: bool = False
    """Make each result independent of what else is in the batch, bit for bit, at some cost in speed."""
    weight_version: Annotated[int, Field(ge=0)] = 0
    """Version of the weights in `model_path`."""


class EngineConfigurationError(ValueError):
    """The engine cannot be started as configured; the message says what to change."""


def serve(settings: EngineSettings) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are then aborted and answered.

    Raises:
        EngineConfigurationError: a bind to more than loopback without an API key, an address that is taken, no such
            model directory, or caches that cannot hold a single sequence.
        UnsupportedModelError: the model cannot be loaded, or not served correctly.
    """
    api_key = read_api_key(settings)
    if not Path(settings.model_path).is_dir():
        raise EngineConfigurationError(f"model_path {settings.model_path}: no such directory")
    listener = open_listener(settings)
    with listener:
        server = build_server(settings, api_key)
        host, port = listener.getsockname()[:2]
        _LOGGER.info("engine serves %s on http://%s:%d", settings.model_path, host, port)
        server.run(sockets=[listener])


def read_api_key(settings: EngineSettings) -> str | None:
    """The API key from the environment; required unless the engine listens on loopback only."""
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    if api_key is None and not _is_loopback(settings.host):
        raise EngineConfigurationError(
            f"host {settings.host} can be reached from elsewhere: set {API_KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    return api_key


def open_listener(settings: EngineSettings) -> socket.socket:
    """Bind before the model is loaded, so that a taken port is found out in no time."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise EngineConfigurationError(f"cannot listen on {settings.host}:{settings.port}: {error}") from error
    return listener


def build_server(settings: EngineSettings, api_key: str | None) -> Server:
    """Load the model and assemble the server, not yet running."""
    from everroll.engines.embedded.assembly import assemble_server

    return assemble_server(settings, api_key)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
