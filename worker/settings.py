"""Settings of a worker process, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from everroll.contracts.base import Spec
from everroll.contracts.names import DEFAULT_TASK_QUEUE


class Role(StrEnum):
    """Which task queue a worker serves."""

    WORKFLOWS = "workflows"
    """Workflows and light activities."""
    ROLLOUT = "rollout"
    """Episodes and collection; start as many as you like."""
    TRAINER = "trainer"
    """Training; one per run at a time."""


class WorkerSettings(Spec):
    """What a worker must know; each field is the variable `EVERROLL_<FIELD>`."""

    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    task_queue: str = DEFAULT_TASK_QUEUE
    admin_key: str = Field(default="everroll-local", repr=False)
    """Opens the session server; secret."""
    engine_api_key: str | None = Field(default=None, repr=False)
    """What engines ask for that listen on more than loopback; secret."""
    metrics_address: str | None = None
    """`host:port` at which Prometheus scrapes `/metrics`; none by default."""
    max_episodes: int = Field(default=128, ge=1)
    """Most episodes, and most collections, that one rollout worker runs at once."""
    deployment_name: str = Field(default="everroll", min_length=1)
    """Name of the worker deployment, where workers have versions."""
    build_id: str | None = Field(default=None, min_length=1)
    """Version of this workflow worker's code, such as a git commit; None for workers without versions."""
    torch_threads: int = Field(default=0, ge=0)
    """CPU threads of the trainer; 0 leaves it to torch."""
    collective_timeout_seconds: float = Field(default=1800.0, gt=0)
    """Of several trainer processes, how long one waits for the others within one operation before it gives up."""
    heartbeat_throttle_seconds: float = Field(default=1.0, gt=0)
    """Longest time that a heartbeat is held back: the work lost when a worker dies, against load on the server."""
    wait_for: str = ""
    """URLs, separated by commas, that must answer 200 before the worker takes its first task: `/health` of servers
    that are started beside it. Whatever it has to load is loaded meanwhile."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """How long it waits for them; after that it stops with an error."""
    graceful_shutdown_seconds: float = Field(default=5.0, ge=0)
    """After SIGTERM, how long activities may finish before they are cancelled (and go on elsewhere)."""
    sticky_timeout_seconds: float = Field(default=2.0, gt=0)
    """How long a workflow task waits for the worker that knows the workflow before any other may take it."""


def load_settings(environment: Mapping[str, str] | None = None, **given: str | None) -> WorkerSettings:
    """Read settings from `EVERROLL_*` variables; what is given and not None wins.

    Raises:
        pydantic.ValidationError: a value is not valid.
    """
    variables = os.environ if environment is None else environment
    values = {
        field: variables[f"EVERROLL_{field.upper()}"]
        for field in WorkerSettings.model_fields
        if f"EVERROLL_{field.upper()}" in variables
    }
    chosen = {field: value for field, value in given.items() if value is not None}
    return WorkerSettings.model_validate(values | chosen)
