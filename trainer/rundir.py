"""The trainer's part of a run directory: where things lie, and what is kept.

trainer.lock               held while a process trains this run
model_files/               the user's tokenizer and other files that are not weights, linked into every step
base_model/                only with adapters: the model that they belong to, linked into every checkpoint
requests/step_000012.json  each step's request, written before it is applied: enough to apply it again
weights/step_000012/       what engines load; written at every step
checkpoints/step_000012/   the same files, and the optimizer's state
steps/step_000012.json     the record of an applied step, written last: the step counts as applied from then on
metrics.jsonl              one line per applied step
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from pydantic import ValidationError

from everroll.contracts.base import Payload
from everroll.contracts.training import GroupBatchItem, LedgerMark, TrainRequest, TrainResult
from everroll.run_files import find_steps, name_step
from everroll.store import write_durably
from trainer.durable import remove_leftovers
from trainer.errors import CheckpointError, RunInUseError

_LOCK_POLL_SECONDS = 0.05
_TAIL_BYTES = 1 << 16


class AppliedStep(Payload):
    """The record of an applied step."""

    batch: list[GroupBatchItem]
    weights_sha256: dict[str, str]
    """Of each weights file, to see whether training the same batch again gave the same weights."""
    result: TrainResult
    mark: LedgerMark | None = None
    """Where the run's ledger stood when it took the batch."""
    parent_sha256: dict[str, str] | None = None
    """Of each weights file of the version that the step was applied to; None in records of earlier versions."""
    checkpoint_sha256: dict[str, str] | None = None
    """Of each file of the step's checkpoint, where one was written; the copy inside the checkpoint has None."""
    device: str | None = None
    """Kind of device that trained it: `cpu`, `cuda`, ... Only on a CPU does the same batch give the same bits."""
    num_threads: int | None = None
    """CPU threads of each process that trained it: another number can change the last bits."""


class RunDirectory:
    """Paths and small files of one run. Owned by one process at a time, through `lock`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model_files = root / "model_files"
        self.base_model = root / "base_model"
        self.metrics_path = root / "metrics.jsonl"
        self._lock_handle: int | None = None

    def lock(self, timeout_seconds: float) -> None:
        """Become the owner, and clear away what a killed owner left half written.

        Raises:
            RunInUseError: another process still owned it when the time was up.
        """
        for name in ("checkpoints", "weights", "requests", "steps"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        handle = os.open(self.root / "trainer.lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + timeout_seconds
        while not _try_lock(handle):
            if time.monotonic() > deadline:
                owner = os.pread(handle, 100, 0).decode(errors="replace").strip()
                os.close(handle)
                raise RunInUseError(f"{self.root} is in use by another trainer ({owner})")
            time.sleep(_LOCK_POLL_SECONDS)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        self._lock_handle = handle
        for parent in (self.root, self.root / "checkpoints", self.root / "weights"):
            remove_leftovers(parent)

    def unlock(self) -> None:
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    def checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / name_step(step)

    def weights(self, step: int) -> Path:
        return self.root / "weights" / name_step(step)

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint directory, newest first. Complete or not."""
        return _list_steps(self.root / "checkpoints")

    def write_request(self, request: TrainRequest) -> None:
        write_durably(self._request(request.step), request.model_dump_json().encode())

    def read_request(self, step: int) -> TrainRequest | None:
        try:
            return TrainRequest.model_validate_json(self._request(step).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{self._request(step)} cannot be read: {error}") from error

    def write_record(self, record: AppliedStep) -> None:
        write_durably(self._record(record.result.step), record.model_dump_json().encode())

    def read_record(self, step: int) -> AppliedStep | None:
        try:
            return AppliedStep.model_validate_json(self._record(step).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{self._record(step)} cannot be read: {error}") from error

    def latest_applied(self) -> int:
        """The newest applied step; 0 if there is none."""
        return max(_list_steps(self.root / "steps"), default=0)

    def append_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Add the step's line, unless it is there. A line that a crash cut short is replaced."""
        with self.metrics_path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            tail = file.read()
            whole = tail[: tail.rfind(b"\n") + 1]
            if len(whole) < len(tail):
                file.truncate(start + len(whole))
            lines = whole.splitlines()
            if lines and json.loads(lines[-1])["step"] >= step:
                return
            file.write(json.dumps({"step": step, **metrics}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def weights_steps(self) -> list[int]:
        """Steps that have a weights directory, newest first."""
        return _list_steps(self.root / "weights")

    def request_steps(self) -> list[int]:
        """Steps whose request is stored, newest first."""
        return _list_steps(self.root / "requests")

    def remove_request(self, step: int) -> None:
        self._request(step).unlink(missing_ok=True)

    def _request(self, step: int) -> Path:
        return self.root / "requests" / f"{name_step(step)}.json"

    def _record(self, step: int) -> Path:
        return self.root / "steps" / f"{name_step(step)}.json"


def _list_steps(parent: Path) -> list[int]:
    """Newest first."""
    return [step for step, _ in reversed(find_steps(parent))]


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
