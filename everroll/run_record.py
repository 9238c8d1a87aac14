"""A run's own account of itself, in its directory: what must outlive Temporal's history.

run.json                     what the run is: its settings as they hold now, its data set, who holds the directory
settled/group_00000012.json  how a group was settled: trainable, or dropped for a cause. Whoever settles it writes it
                             before the run hears of it; the run itself replaces it by a drop (stale, skipped)
steering.jsonl               what was asked of the run, one line each
curriculum.jsonl             what a curriculum chose, a line for each block of groups

The trainer's part lies beside it (`trainer.rundir`): steps/step_000012.json says which groups a step has trained.
Together they are the run's state: see docs/decisions/0007-a-runs-state-lies-in-its-directory.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from everroll.contracts import names
from everroll.contracts.base import Payload
from everroll.contracts.curriculum import PlannedBlock
from everroll.contracts.rollout import DatasetRef, GroupResult
from everroll.contracts.spec import CurriculumSpec, RunSpec
from everroll.contracts.steering import SteeringRecord
from everroll.contracts.training import ForkOrigin
from everroll.failures import ConfigurationError
from everroll.records import append_once
from everroll.store import write_durably

_TAIL_BYTES = 1 << 16


class RunRecord(Payload):
    """`run.json`."""

    schema_version: int = 1
    spec: RunSpec
    """What holds now: as started, with everything that was changed since."""
    dataset: DatasetRef
    executions: list[str] = Field(min_length=1)
    """Temporal's ids of the executions that began or resumed it; the last one holds the directory."""
    num_resumes: int = 0
    forked_from: ForkOrigin | None = None


def check_dataset(recorded: DatasetRef, found: DatasetRef) -> None:
    """
    Raises:
        ConfigurationError: it is not the same data; both fingerprints are named.
    """
    if recorded.fingerprint != found.fingerprint:
        raise ConfigurationError(
            f"data set {found.path} is not the one that the run began with: its fingerprint was "
            f"{recorded.fingerprint} and is now {found.fingerprint}. Restore the files, or start a new run."
        )


class RunRecordDirectory:
    """Reads and writes one run's account. Every file appears whole or not at all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._run = root / names.RUN_RECORD_FILE
        self._settled = root / "settled"
        self._steering = root / "steering.jsonl"
        self._curriculum = root / "curriculum.jsonl"

    def read(self) -> RunRecord | None:
        """None where no run has been recorded.

        Raises:
            ConfigurationError: the record cannot be read.
        """
        try:
            return RunRecord.model_validate_json(self._run.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ConfigurationError(f"{self._run} cannot be read: {error}") from error

    def write(self, record: RunRecord) -> None:
        self._settled.mkdir(parents=True, exist_ok=True)
        write_durably(self._run, record.model_dump_json(indent=1).encode())

    def write_settled(self, result: GroupResult) -> None:
        self._settled.mkdir(parents=True, exist_ok=True)
        body = result.model_copy(update={"report": None}).model_dump_json(exclude_defaults=True)
        write_durably(self._settled / f"group_{result.group:08d}.json", body.encode())

    def read_settled(self) -> dict[int, GroupResult]:
        """By group.

        Raises:
            ConfigurationError: one cannot be read.
        """
        results = {}
        for path in self._settled.glob("group_*.json"):
            try:
                result = GroupResult.model_validate_json(path.read_bytes())
            except (OSError, ValidationError) as error:
                raise ConfigurationError(f"{path} cannot be read: {error}") from error
            results[result.group] = result
        return dict(sorted(results.items()))

    def append_steerings(self, records: Sequence[SteeringRecord]) -> None:
        """Add lines, those that are there already left out. A line that a crash cut short is replaced."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._steering.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            tail = file.read()
            whole = tail[: tail.rfind(b"\n") + 1]
            if len(whole) < len(tail):
                file.truncate(start + len(whole))
            lines = whole.splitlines()
            last = json.loads(lines[-1])["number"] if lines else 0
            for record in records:
                if record.number > last:
                    file.write(record.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read_steerings(self) -> list[SteeringRecord]:
        """All whole lines, oldest first."""
        if not self._steering.exists():
            return []
        lines = self._steering.read_bytes().splitlines(keepends=True)
        return [SteeringRecord.model_validate_json(line) for line in lines if line.endswith(b"\n")]

    def append_plan(self, block: PlannedBlock) -> None:
        """
        Raises:
            ConfigurationError: it cannot be written.
        """
        try:
            append_once(self._curriculum, block.model_dump(mode="json"), lambda line: _is_plan(line, block))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self._curriculum} cannot be written: {error}. "
                "With a curriculum, rollout workers need the run directory"
            ) from error

    def read_plans(self) -> list[PlannedBlock]:
        """All whole lines, oldest first; where two are about the same group, the later one holds.

        Raises:
            ConfigurationError: one cannot be read.
        """
        if not self._curriculum.exists():
            return []
        try:
            lines = self._curriculum.read_bytes().splitlines(keepends=True)
            return [PlannedBlock.model_validate_json(line) for line in lines if line.endswith(b"\n")]
        except (OSError, ValidationError) as error:
            raise ConfigurationError(f"{self._curriculum} cannot be read: {error}") from error

    def read_plan(self, first_group: int, curriculum: CurriculumSpec) -> PlannedBlock | None:
        """What this curriculum chose for the block that begins there."""
        plans = [plan for plan in self.read_plans() if (plan.first_group, plan.curriculum) == (first_group, curriculum)]
        return plans[-1] if plans else None


def _is_plan(line: dict[str, Any], block: PlannedBlock) -> bool:
    known = PlannedBlock.model_validate(line)
    return (known.first_group, known.curriculum) == (block.first_group, block.curriculum)
