"""The stack's state file, `.everroll/stack.json`: how other commands find the stack, and how `down` ends it.

The file holds the stack's admin key, hence its mode 0600. Whether a stack runs is told by a lock that its supervisor
holds, not by the file: the lock ends with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everroll.local.identity import ProcessIdentity
from everroll.store import write_durably

DEFAULT_STACK_DIR = Path(".everroll")


class StackError(RuntimeError):
    """The local stack cannot be started, found or stopped; the text says why."""


class ProcessPhase(StrEnum):
    STARTING = "starting"
    HEALTHY = "healthy"
    RESTARTING = "restarting"
    """Ended by itself; waits to be started again."""
    STOPPED = "stopped"
    FAILED = "failed"
    """Ended too often; not started again."""


class StackPhase(StrEnum):
    STARTING = "starting"
    HEALTHY = "healthy"
    FAILED = "failed"
    STOPPING = "stopping"


class ProcessState(BaseModel):
    """One child process of the stack."""

    name: str
    phase: ProcessPhase
    identity: ProcessIdentity | None = None
    """None while no process runs."""
    restarts: int = 0
    last_exit: str | None = None
    """How it last ended, e.g. `killed by SIGKILL`."""
    log: str
    """File that holds its output."""


class StackAddresses(BaseModel):
    """Where the stack's services listen."""

    model_config = ConfigDict(frozen=True)

    temporal_address: str
    temporal_namespace: str = "default"
    task_queue: str
    ui_url: str | None = None
    session_url: str | None = None
    engine_urls: list[str] = Field(default_factory=list)
    store_url: str

    def service_defaults(self) -> dict[str, Any]:
        """Values for [services] of a run file that does not set them."""
        defaults = self.model_dump(exclude={"ui_url"}, exclude_none=True)
        return {key: value for key, value in defaults.items() if value != []}


class StackState(BaseModel):
    """What the state file holds."""

    schema_version: int = 1
    phase: StackPhase
    supervisor: ProcessIdentity
    addresses: StackAddresses
    admin_key: str
    processes: list[ProcessState] = Field(default_factory=list)
    failure: str | None = None


class StackDirectory:
    """Where one stack keeps its files."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.state_file = self.root / "stack.json"
        self.lock_file = self.root / "stack.lock"
        self.addresses_file = self.root / "addresses.json"
        """Kept after the stack has gone: open runs know its services by these addresses."""
        self.logs = self.root / "logs"

    def create(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)

    def write_state(self, state: StackState) -> None:
        """Replace the state file; it appears whole or not at all, readable by its owner only."""
        write_durably(self.state_file, state.model_dump_json(indent=2).encode())
        if self.read_last_addresses() != state.addresses:
            write_durably(self.addresses_file, state.addresses.model_dump_json(indent=2).encode())

    def read_last_addresses(self) -> StackAddresses | None:
        """Where the services listened last; None if that is not known."""
        try:
            return StackAddresses.model_validate_json(self.addresses_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def read_state(self) -> StackState | None:
        """The state last written, whether or not that stack still runs; None if there is none.

        Raises:
            StackError: the file is not one of this version's.
        """
        try:
            return StackState.model_validate_json(self.state_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StackError(f"{self.state_file} cannot be read; remove it if no stack runs: {error}") from error

    def read_running_state(self) -> StackState | None:
        """The state of the stack that runs here, or None if none does."""
        return self.read_state() if self.is_locked() else None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the right to run a stack here.

        Raises:
            StackError: another supervisor holds it.
        """
        handle = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock_patiently(handle):
                state = self.read_state()
                pid = f" (pid {state.supervisor.pid})" if state else ""
                raise StackError(f"a stack runs in {self.root} already{pid}; `everroll down` stops it")
            yield
        finally:
            os.close(handle)

    def is_locked(self) -> bool:
        """Whether a supervisor runs here."""
        try:
            handle = os.open(self.lock_file, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not _try_lock(handle)
        finally:
            os.close(handle)


def _lock_patiently(handle: int) -> bool:
    """Try for a moment: a command that looks whether a stack runs holds the lock for some microseconds."""
    deadline = time.monotonic() + 0.5
    while not _try_lock(handle):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
