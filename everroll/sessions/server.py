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
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from everroll.engines.base import API_KEY_VARIABLE
from everroll.engines.http import EngineTimeouts, open_client_session
from everroll.engines.open import open_engine
from everroll.failures import ConfigurationError
from everroll.sessions.app import SessionApp, build_app
from everroll.sessions.core import SessionCore
from everroll.sessions.errors import JournalError
from everroll.sessions.history import load_history_match
from everroll.sessions.journal import Journal, is_postgres, open_journal
from everroll.sessions.keys import check_bind, load_admin_key
from everroll.sessions.metrics import SessionMetrics
from everroll.sessions.peers import PeerRouting
from everroll.sessions.retention import Retention, keep_house, keep_lease
from everroll.sessions.settings import SessionServerSettings
from everroll.sessions.sqlite_database import lock_sqlite
from everroll.sessions.storage import StorageGauge
from everroll.sessions.turns import TurnMaker
from everroll.sessions.upstream import Patience, Upstream
from everroll.tokens.renderer import ChatRenderer, load_renderer

_KEEP_ALIVE_SECONDS = 75
"""Longer than any client keeps an idle connection, so that it is the client that closes."""

_GC_THRESHOLDS = (10_000, 20, 50)
"""Turns in memory are many objects and no cycles: full collections, which walk them all, are made rare."""

_ENGINE_CHECK_TIMEOUT_SECONDS = 10.0

_log = logging.getLogger(__name__)


def serve(settings: SessionServerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is being answered and close the journal.

    Raises:
        ConfigurationError: it cannot start as configured (model, address, keys).
        JournalError: the journal cannot be opened, or another server has it.
    """
    admin_key = load_admin_key()
    for host in (settings.host, settings.peer_host):
        check_bind(host, admin_key)
    with contextlib.ExitStack() as stack:
        if not is_postgres(settings.journal):
            stack.enter_context(lock_sqlite(Path(settings.journal)))
        if settings.processes > 1:
            from everroll.sessions.supervisor import supervise

            load_renderer(settings.model)  # what is wrong with the model is said here, once
            with listen(settings.host, settings.port) as listener:
                supervise(settings, listener)
        else:
            serve_member(settings, None)


def serve_member(settings: SessionServerSettings, listener: socket.socket | None) -> None:
    """Serve in this process: at the address of all (`listener`), or alone at one of its own (None).

    The caller has seen to it that no stranger has an SQLite journal open.
    """
    renderer = load_renderer(settings.model)
    gc.freeze()  # what is loaded by now stays; collections need not walk it again and again
    gc.set_threshold(*_GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, renderer, load_admin_key(), listener))


async def _serve(
    settings: SessionServerSettings, renderer: ChatRenderer, admin_key: str, shared: socket.socket | None
) -> None:
    alone = shared is None and not is_postgres(settings.journal)
    listeners = [] if alone else [listen(settings.peer_host, settings.peer_port)]
    peer_url = "" if alone else _build_url(listeners[0])
    async with open_app(settings, renderer, admin_key, peer_url=peer_url, alone=alone) as app:
        listeners.append(listen(settings.host, settings.port) if shared is None else shared)
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
        _log.info("session server on %s, renderer %s", _build_url(listeners[-1]), renderer.name)
        await server.serve(sockets=listeners)


@contextlib.asynccontextmanager
async def open_app(
    settings: SessionServerSettings,
    renderer: ChatRenderer,
    admin_key: str,
    *,
    peer_url: str = "",
    alone: bool = True,
) -> AsyncIterator[ASGIApp]:
    """The application over a real journal and real engines, which are closed at the end.

    `peer_url` is where other servers over this journal reach this one. `alone` says that there are none, so that it
    holds all sessions from the start.
    """
    match = load_history_match(settings.model.history_match)
    timeouts = EngineTimeouts(
        generate_seconds=settings.engine_timeout_seconds, control_seconds=_ENGINE_CHECK_TIMEOUT_SECONDS
    )
    patience = Patience(settings.engine_patience_seconds, settings.turn_timeout_seconds)
    async with contextlib.AsyncExitStack() as stack:
        journal = await open_journal(
            settings.journal,
            settings.journal_synchronous,
            peer_url=peer_url,
            lease_seconds=settings.lease_seconds,
        )
        stack.push_async_callback(journal.close)
        await stack.enter_async_context(_leasing(journal, alone))
        http = await stack.enter_async_context(
            open_client_session(settings.max_engine_connections, os.environ.get(API_KEY_VARIABLE))
        )
        peer_http = await stack.enter_async_context(open_client_session(settings.max_engine_connections, None))
        engines = [open_engine(settings.engine_kind, url, http, timeouts=timeouts) for url in settings.engine_urls]
        upstream = Upstream(engines, patience, settings.engine_failure_threshold)
        await stack.enter_async_context(upstream.pool.checking(settings.engine_check_seconds))
        storage = StorageGauge(journal.database, settings.max_journal_bytes, settings.min_free_bytes)
        await storage.measure()
        metrics = SessionMetrics()
        core = SessionCore(journal, TurnMaker(renderer, upstream, match), settings.limits, storage, metrics)
        stack.push_async_callback(core.close)
        retention = Retention(journal, core, settings.retention)
        await stack.enter_async_context(_running(keep_house(retention, storage, settings.housekeeping_seconds)))
        handlers = SessionApp(
            core=core,
            retention=retention,
            admin_key=admin_key,
            model=settings.model_name or Path(settings.model.path).name,
            info=build_info(settings, renderer),
            describe_engines=upstream.describe,
            metrics=metrics,
            server_id=journal.server_id,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_seconds=settings.body_timeout_seconds,
            stream_keepalive_seconds=settings.stream_keepalive_seconds,
        )
        yield PeerRouting(
            build_app(handlers),
            journal,
            peer_http,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_seconds=settings.body_timeout_seconds,
            answer_timeout_seconds=settings.turn_timeout_seconds + 2 * settings.lease_seconds,
            metrics=metrics,
        )


@contextlib.asynccontextmanager
async def _leasing(journal: Journal, alone: bool) -> AsyncIterator[None]:
    """Hold a lease meanwhile, and end it at the end so that others need not wait for it to run out."""
    if alone:
        await journal.end_all_leases()
    await journal.renew_lease()
    async with _running(keep_lease(journal)):
        yield
    with contextlib.suppress(JournalError):
        await journal.end_lease(journal.server_id)


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Keep a coroutine running meanwhile."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def build_info(settings: SessionServerSettings, renderer: ChatRenderer) -> dict[str, Any]:
    """What `GET /info` tells: enough for a run to check that this server serves its model."""
    packages = ("everroll", "renderers", "tokenizers")
    return {
        "model_path": str(Path(settings.model.path).absolute()),
        "renderer": renderer.name,
        "chat_template": settings.model.chat_template,
        "history": settings.model.history,
        "history_match": settings.model.history_match,
        "tokenizer_fingerprint": renderer.fingerprint,
        "engine_urls": settings.engine_urls,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: uvicorn would raise them again after serving, before the journal is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigurationError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from error


def _build_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
