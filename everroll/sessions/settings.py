"""Settings of the session server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from everroll.contracts.base import Spec
from everroll.contracts.spec import EngineKind, ModelSection, PositiveInt, Seconds
from everroll.sessions.core import SessionLimits
from everroll.sessions.retention import RetentionPolicy


class SessionServerSettings(Spec):
    """Everything that a session server needs."""

    model: ModelSection
    engine_urls: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+")]] = Field(min_length=1)
    """Base URLs of the engines that sample."""
    engine_kind: EngineKind = "auto"
    """What the engines are: `sglang`, `vllm`, or `auto` to ask each."""
    journal: str = Field(min_length=1, repr=False)
    """Where turns are kept: an SQLite file, made if it is not there, or `postgresql://user@host/database`. Give a URL
    with a password in the environment, not on the command line."""
    journal_synchronous: Literal["full", "normal"] = "full"
    """`full`: no answered turn is lost even if the machine crashes. `normal`: only if the process is killed."""
    processes: PositiveInt = 1
    """Processes that share the address, so that one machine uses several cores."""
    peer_host: str = "127.0.0.1"
    """Address at which the other servers over one journal reach this one; over several machines one that they can
    reach."""
    peer_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of it; 0 takes a free one for each process."""
    lease_seconds: Annotated[float, Field(ge=1, le=600)] = 10.0
    """How long a server that has fallen silent keeps its sessions before others take them over."""
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
    stream_keepalive_seconds: Seconds = 15.0
    """A stream whose turn takes longer gets a sign of life so often; an error after the first one arrives as an event
    of the stream, before it as an HTTP status."""
    max_turns: PositiveInt = 10_000
    """Most turns that one session records."""
    max_session_tokens: PositiveInt = 10_000_000
    """Most tokens that one session records, all its turns together."""
    max_journal_bytes: PositiveInt | None = None
    """Size of the journal from which no new sessions are taken (507)."""
    min_free_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    """Free space on an SQLite journal's disk below which no new sessions are taken (507)."""
    session_idle_limit_hours: Annotated[float, Field(gt=0, le=24 * 365)] = 24.0
    """How long a session may go unused before it is released. A run none of whose sessions is used for as long is taken
    to have ended."""
    run_grace_hours: Annotated[float, Field(ge=0, le=24 * 365)] = 1.0
    """How long after the end of its run a session that nobody released is."""
    retention_days: Annotated[float, Field(ge=0, le=3650)] = 7.0
    """How long after the end of its run a released session is kept; after it a digest stays."""
    housekeeping_seconds: Seconds = 60.0
    """Time between two looks at what is to be released and deleted, and at the journal's size."""
    max_cached_sessions: PositiveInt = 4096
    """Most sessions in memory; the others are read from the journal when they are used again."""
    engine_timeout_seconds: Seconds = 600.0
    """Longest wait for one completion."""
    engine_patience_seconds: Annotated[float, Field(ge=0, le=24 * 3600)] = 60.0
    """How long a turn waits for engines that are paused, updating or overloaded, or whose connections break."""
    turn_timeout_seconds: Seconds = 900.0
    """Longest time for one turn, over all engines and all tries."""
    engine_check_seconds: Seconds = 5.0
    """Time between two health checks of an engine."""
    engine_failure_threshold: PositiveInt = 3
    """Failed checks and calls in a row after which an engine is asked last; one success makes it healthy again."""
    max_engine_connections: PositiveInt = 1024
    """Most calls to engines at a time; others queue."""
    shutdown_grace_seconds: PositiveInt = 5
    """How long calls in flight may go on after SIGTERM."""

    @property
    def limits(self) -> SessionLimits:
        return SessionLimits(self.max_turns, self.max_session_tokens, self.max_cached_sessions)

    @property
    def retention(self) -> RetentionPolicy:
        return RetentionPolicy(
            idle_seconds=self.session_idle_limit_hours * 3600,
            grace_seconds=self.run_grace_hours * 3600,
            retention_seconds=self.retention_days * 24 * 3600,
        )
