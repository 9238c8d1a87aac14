"""`everroll simulated-engine`: settings and the serving process."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import uvicorn
from pydantic import Field
from tokenizers import Tokenizer

from everroll.contracts.base import Spec
from everroll.engines.base import API_KEY_VARIABLE
from everroll.engines.embedded.wire import ModelLimits
from everroll.failures import ConfigurationError
from everroll.simulation.distributions import Distribution, build_distribution
from everroll.simulation.engine import EngineBehaviour, SimulatedEngine
from everroll.simulation.engine_app import SimulatedEngineApp, build_app

_LOGGER = logging.getLogger(__name__)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_WORDS = "the first part of this answer says what was found and the next step is to look at it again with more care"


class SimulatedEngineSettings(Spec):
    """How a simulated engine behaves. A 95th percentile that is left out makes the value a constant."""

    model_path: str
    """Directory with `config.json` and `tokenizer.json`; weights are not needed."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs an API key in EVERROLL_ENGINE_API_KEY."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8820
    """Port to listen on; 0 takes a free one and logs it."""
    first_token_seconds: Annotated[float, Field(ge=0)] = 0.2
    """Median time to the first token, queueing not counted."""
    first_token_p95_seconds: Annotated[float, Field(ge=0)] | None = None
    """Its 95th percentile."""
    tokens_per_second: Annotated[float, Field(gt=0)] = 50.0
    """Rate of one request, after its first token."""
    completion_tokens: Annotated[float, Field(ge=1)] = 200.0
    """Median length of a completion."""
    completion_p95_tokens: Annotated[float, Field(ge=1)] | None = None
    """Its 95th percentile."""
    max_batch_size: Annotated[int, Field(ge=1)] = 256
    """Requests served at once; the others queue."""
    max_context_tokens: Annotated[int, Field(ge=2)] = 32_768
    """Longest prompt and completion together."""
    failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of requests that the engine aborts half-way."""
    update_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Time to load new weights."""

    def behaviour(self) -> EngineBehaviour:
        """
        Raises:
            ConfigurationError: a median and a percentile do not go together.
        """
        return EngineBehaviour(
            first_token_seconds=_distribution("first-token", self.first_token_seconds, self.first_token_p95_seconds),
            tokens_per_second=self.tokens_per_second,
            completion_tokens=_distribution("completion", self.completion_tokens, self.completion_p95_tokens),
            max_batch_size=self.max_batch_size,
            failure_rate=self.failure_rate,
            update_seconds=self.update_seconds,
        )


class _Server(uvicorn.Server):
    """A signal that was obeyed is not raised once more: the process ends with exit code 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def serve(settings: SimulatedEngineSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a bind to more than loopback without an API key, an address that is taken, no such model,
            or numbers that do not go together.
    """
    server = build_server(settings)
    with open_listener(settings) as listener:
        host, port = listener.getsockname()[:2]
        _LOGGER.info("simulated engine for %s on http://%s:%d", settings.model_path, host, port)
        server.run(sockets=[listener])


def build_server(settings: SimulatedEngineSettings) -> uvicorn.Server:
    """The server, not yet running."""
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    if api_key is None and settings.host not in _LOOPBACK:
        raise ConfigurationError(f"host {settings.host} can be reached from elsewhere: set {API_KEY_VARIABLE}")
    word_ids, limits = _read_model(Path(settings.model_path), settings.max_context_tokens)
    engine = SimulatedEngine(settings.behaviour(), word_ids, model_path=settings.model_path)
    app = build_app(SimulatedEngineApp(engine, limits), api_key)
    return _Server(
        uvicorn.Config(app, access_log=False, log_config=None, timeout_keep_alive=75, timeout_graceful_shutdown=1)
    )


def open_listener(settings: SimulatedEngineSettings) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen()  # connections wait in its queue until the server runs
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"cannot listen on {settings.host}:{settings.port}: {error}") from error
    return listener


def _read_model(directory: Path, max_context: int) -> tuple[list[int], ModelLimits]:
    """Ids of ordinary words of the model's tokenizer, and what requests are checked against."""
    try:
        config = json.loads((directory / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigurationError(f"model_path {directory}: {error}") from error
    eos = config.get("eos_token_id")
    eos_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
    vocab_size = max(int(config.get("vocab_size", 0)), tokenizer.get_vocab_size())
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = set(tokenizer.encode(_WORDS, add_special_tokens=False).ids) - special - eos_ids
    if not found:
        raise ConfigurationError(f"model_path {directory}: its tokenizer knows no ordinary words")
    return sorted(found), ModelLimits(vocab_size, max_context, eos_ids)


def _distribution(name: str, median: float, p95: float | None) -> Distribution:
    try:
        return build_distribution(median, p95)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from error
