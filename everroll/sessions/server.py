"""The session server as a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
import uvloop
from pydantic import Field
from starlette.applications import Starlette

from everroll.contracts.base import Spec
from everroll.contracts.spec import EngineKind, ModelSection, PositiveInt, Seconds
from everroll.engines.base import API_KEY_VARIABLE
from everroll.engines.http import EngineTimeouts, open_client_session
from everroll.engines.open import open_engine
from everroll.failures import ConfigurationError
from everroll.sessions.app import SessionApp, build_app
from everroll.sessions.core import SessionCore
from everroll.sessions.journal import open_journal
from everroll.sessions.keys import check_bind, load_admin_key
from everroll.sessions.turns import TurnMaker
from everroll.sessions.upstream import Patience, Upstream
from everroll.tokens.renderer import ChatRenderer, load_renderer

_KEEP_ALIVE_SECONDS = 75
"""Longer than any client keeps an idle connection, so that it is the client that closes."""

_log = logging.getLogger(__name__)
_ENGINE_CHECK_TIMEOUT_SECONDS = 10.0



class SessionServerSettings(Spec):
    """Everything that one session server process needs."""

    model: ModelSection
    engine_urls: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+")]] = Field(min_length=1)
    """Base URLs of the engines that sample."""
    journal_path: str
    engine_kind: EngineKind = "auto"
    """What the engines are: `sglang`, `vllm`, or `auto` to ask each."""
    """SQLite file of the journal; made if it is not there."""
    journal_synchronous: Literal["full", "normal"] = "full"
    """`full`: no answered turn is lost even if the machine crashes. `normal`: only if the process is killed."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback needs EVERROLL_ADMIN_KEY."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8810
    """0 takes a free port; the log names it."""
    model_name: str = ""
    """Name of the model as agents see it; default: the checkpoint directory's name."""
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest request body."""
    body_timeout_seconds: Seconds = 60.0
    """Longest time that a request's body may take to arrive."""
    max_turns: PositiveInt = 10_000
    """Most turns that one session records."""
    max_cached_sessions: PositiveInt = 4096
    """Most sessions in memory; the others are read from the journal when they are used again."""
    engine_timeout_seconds: Seconds = 600.0
    """Longest wait for one completion."""
    max_engine_connections: PositiveInt = 1024
    """Most calls to engines at a time; others queue."""
    shutdown_grace_seconds: PositiveInt = 5
    """How long calls in flight may go on after SIGTERM."""
    engine_patience_seconds: Annotated[float, Field(ge=0, le=24 * 3600)] = 60.0
    """How long a turn waits for engines that are paused, updating or overloaded, or whose connections break."""
    turn_timeout_seconds: Seconds = 900.0
    """Longest time for one turn, over all engines and all tries."""
    engine_check_seconds: Seconds = 5.0
    """Time between two health checks of an engine."""
    engine_failure_threshold: PositiveInt = 3
    """Failed checks and calls in a row after which an engine is asked last; one success makes it healthy again."""


def serve(settings: SessionServerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is being answered and close the journal.

    Raises:
        ConfigurationError: it cannot start as configured (model, address, keys).
        JournalError: the journal cannot be opened.
    """
    admin_key = load_admin_key()
    check_bind(settings.host, admin_key)
    renderer = load_renderer(settings.model)
    gc.freeze()  # what is loaded by now stays; collections need not walk it again and again
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, renderer, admin_key))


async def _serve(settings: SessionServerSettings, renderer: ChatRenderer, admin_key: str) -> None:
    async with open_app(settings, renderer, admin_key) as app:
        listener = _listen(settings.host, settings.port)
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=settings.shutdown_grace_seconds,
        )
        server = _Server(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        host, port = listener.getsockname()[:2]
        _log.info("session server on http://%s:%d, renderer %s", host, port, renderer.name)
        await server.serve(sockets=[listener])


@contextlib.asynccontextmanager
async def open_app(settings: SessionServerSettings, renderer: ChatRenderer, admin_key: str) -> AsyncIterator[Starlette]:
    """The application over a real journal and real engines, which are closed at the end."""
    match = load_history_match(settings.model.history_match)
    timeouts = EngineTimeouts(
        generate_seconds=settings.engine_timeout_seconds, control_seconds=_ENGINE_CHECK_TIMEOUT_SECONDS
    )
    patience = Patience(settings.engine_patience_seconds, settings.turn_timeout_seconds)
    async with contextlib.AsyncExitStack() as stack:
        journal = open_journal(Path(settings.journal_path), settings.journal_synchronous)
        stack.push_async_callback(journal.close)
        http = await stack.enter_async_context(
            open_client_session(settings.max_engine_connections, os.environ.get(API_KEY_VARIABLE))
        )
        engines = [open_engine(settings.engine_kind, url, http, timeouts=timeouts) for url in settings.engine_urls]
        upstream = Upstream(engines, patience, settings.engine_failure_threshold)
        await stack.enter_async_context(upstream.pool.checking(settings.engine_check_seconds))
        maker = TurnMaker(renderer, upstream, match)
        core = SessionCore(journal, maker, settings.max_turns, settings.max_cached_sessions)
        stack.push_async_callback(core.close)
        handlers = SessionApp(
            core=core,
            admin_key=admin_key,
            model=settings.model_name or Path(settings.model.path).name,
            info=build_info(settings, renderer),
            max_body_bytes=settings.max_body_bytes,
            body_timeout_seconds=settings.body_timeout_seconds,
        )
        yield build_app(handlers)
            describe_engines=upstream.describe,


def build_info(settings: SessionServerSettings, renderer: ChatRenderer) -> dict[str, Any]:
    """What `GET /info` tells: enough for a run to check that this server serves its model."""
    packages = ("everroll", "renderers", "tokenizers")
    return {
        "model_path": str(Path(settings.model.path).absolute()),
        "renderer": renderer.name,
        "history": settings.model.history,
        "tokenizer_fingerprint": renderer.fingerprint,
        "engine_urls": settings.engine_urls,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: uvicorn would raise them again after serving, before the journal is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigurationError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from error
