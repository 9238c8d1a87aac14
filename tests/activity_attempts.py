"""An attempt at an activity, by itself: with what the attempt before had told, and what it tells in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from temporalio.testing import ActivityEnvironment


class ActivityAttempt:
    """Runs an activity's code in `environment`."""

    def __init__(self, details: Sequence[Any], heartbeat_timeout_seconds: float) -> None:
        """`details`: the last heartbeat of the attempt before; empty for the first attempt."""
        self.environment = ActivityEnvironment()
        self.environment.info = dataclasses.replace(
            self.environment.info,
            heartbeat_details=list(details),
            heartbeat_timeout=timedelta(seconds=heartbeat_timeout_seconds),
        )
        self.heartbeats: list[tuple[Any, ...]] = []
        self.environment.on_heartbeat = lambda *details: self.heartbeats.append(details)
