"""What an audit is made from, as values. Reading them is `sources`' business; what they must satisfy, the checks'.

Nothing here is computed by the run for the audit: these are the events of its history, the rows of the journal, and
the files of store and run directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everroll.contracts.base import Payload
from everroll.contracts.batches import StoredBatch
from everroll.contracts.rollout import (
    BlobRef,
    CollectRequest,
    CollectResult,
    DatasetRef,
    EpisodeReport,
    EpisodeRequest,
    GroupManifest,
    GroupRequest,
    GroupResult,
    StoreGroupRequest,
)
from everroll.contracts.spec import RunSpec
from everroll.contracts.steering import SteeringRecord
from everroll.contracts.training import (
    ForkOrigin,
    GroupBatchItem,
    LedgerMark,
    RunState,
    TrainingRunResult,
    TrainRequest,
    TrainResult,
)
from everroll.sessions.digest import SessionDigest
from everroll.sessions.reading import RecordedSession
from everroll.tokens.samples import SampleSet

# The run's history, event by event


@dataclass(frozen=True)
class Dispensed:
    """The run started a group."""

    request: GroupRequest
    task: int = 0
    """Workflow tasks of the run completed before, that which started it included."""


@dataclass(frozen=True)
class Settled:
    """The run learned how a group ended."""

    group: int
    result: GroupResult | None
    """None when the group was ended from outside, or failed."""
    ending: str = "completed"
    """`completed`, `canceled`, `terminated`, or else the group failed the run."""
    task: int = 0
    """Workflow tasks of the run completed before: what comes in during one is seen by the next."""


@dataclass(frozen=True)
class StepScheduled:
    """The run handed a batch to the trainer."""

    request: TrainRequest
    task: int = 0
    """Workflow tasks of the run completed before, that which decided it included."""


@dataclass(frozen=True)
class StepCompleted:
    """The trainer answered for a step."""

    requested_step: int
    result: TrainResult


@dataclass(frozen=True)
class BatchRead:
    """A run that plays nothing was told a batch that another run had stored."""

    step: int
    batch: StoredBatch


@dataclass(frozen=True)
class Published:
    """All engines were brought to a version."""

    version: int


@dataclass(frozen=True)
class Planned:
    """A curriculum chose the prompts of a block of groups."""

    first_group: int
    prompts: list[int]


@dataclass(frozen=True)
class Changed:
    """Somebody changed the run's settings."""

    spec: RunSpec
    task: int = 0
    """Workflow tasks of the run completed before, that which accepted it included."""


@dataclass(frozen=True)
class Recorded:
    """The run wrote its settings down in run.json."""

    spec: RunSpec


@dataclass(frozen=True)
class Skipped:
    """Somebody had a group dropped."""

    group: int


RunEvent = (
    Dispensed | Settled | StepScheduled | StepCompleted | BatchRead | Published | Planned | Changed | Recorded | Skipped
)


@dataclass(frozen=True)
class Generation:
    """One execution of `TrainingRun`, between two continue-as-new."""

    run_id: str
    start: RunState | None
    """What it took over; None for the first."""
    events: list[RunEvent]
    num_tasks: int | None = None
    """Workflow tasks completed in it. What came in during the last one was too late for the state that was carried on,
    and is heard of again by the next generation."""
    spec: RunSpec | None = None
    """The settings that it began with; None: the run's first."""
    steerings: list[SteeringRecord] = field(default_factory=list)
    """What it wrote into the run directory of what was asked of it."""
    steerings_under_way: list[SteeringRecord] = field(default_factory=list)
    """All that it had written or was about to write: the last of them may be there or not."""
    restores: bool = False
    """It only read the run directory, after the run had ended or was forked; the next one starts from that."""
    fork: ForkOrigin | None = None
    """What it was forked from."""


@dataclass(frozen=True)
class RunHistory:
    """All generations of a run, oldest first."""

    spec: RunSpec
    dataset: DatasetRef | None
    """None when it ended before it was prepared."""
    generations: list[Generation]
    state: str
    """`running`, `completed`, `failed`, `canceled`, `terminated` or `timed_out`."""
    stopped: bool = False
    """Asked to stop before its last step."""
    num_surplus: int = 0
    """Groups that it counts as started in excess, once it has completed."""
    result: TrainingRunResult | None = None
    """What it answered, once it has completed."""
    is_cut: bool = False
    """Earlier generations are gone: what they did is known from the state that the first of these took over."""


# A group's history


@dataclass(frozen=True)
class EpisodeHistory:
    """What the group's history says of one attempt at one episode."""

    request: EpisodeRequest
    report: EpisodeReport | None = None
    """None when `run_episode` gave none."""
    collect: CollectRequest | None = None
    collected: CollectResult | None = None


@dataclass(frozen=True)
class GroupHistory:
    """A group's workflow `RolloutGroup`, all its executions together."""

    request: GroupRequest
    episodes: dict[str, EpisodeHistory] = field(default_factory=dict)
    """By session id."""
    stored: StoreGroupRequest | None = None
    manifest: BlobRef | None = None
    """What `store_group` answered."""
    result: GroupResult | None = None
    """None while it is open, or when it ended otherwise."""


# Store


@dataclass(frozen=True)
class StoredGroup:
    """A group's manifest as it lies in the store."""

    manifest: GroupManifest | None
    """None when it cannot be read."""
    trouble: str | None = None
    """Why it cannot, or that it is not what was written."""
    missing: bool = False


@dataclass(frozen=True)
class StoredSamples:
    """One episode's samples as they lie in the store."""

    sample_set: SampleSet | None
    trouble: str | None = None
    missing: bool = False


# Run directory. The trainer writes it; its format is read here anew, so that the proof rests on the files alone.


class StepRecordFile(Payload):
    """`steps/step_NNNNNN.json`."""

    batch: list[GroupBatchItem]
    weights_sha256: dict[str, str]
    result: TrainResult
    mark: LedgerMark | None = None
    """Where the run's ledger stood when it took the batch; None in records of earlier versions."""
    parent_sha256: dict[str, str] | None = None
    """Of the weights that the step was applied to; None in records of earlier versions."""
    checkpoint_sha256: dict[str, str] | None = None
    device: str | None = None
    num_threads: int | None = None


class RunRecordFile(Payload):
    """`run.json`."""

    spec: RunSpec
    forked_from: ForkOrigin | None = None


class SealedFile(Payload):
    sha256: str
    num_bytes: int


class DirectoryManifest(Payload):
    """`manifest.json` of a directory of weights or of a checkpoint."""

    files: dict[str, SealedFile]


@dataclass(frozen=True)
class SealedDirectory:
    """A directory of weights or of a checkpoint that is still there."""

    step: int
    path: Path
    manifest: DirectoryManifest | None
    hashes: dict[str, str]
    """sha256 of each file as it is now."""
    state_step: int | None = None
    """What a checkpoint says it is."""
    state_record: StepRecordFile | None = None
    """The record of its step that a checkpoint carries."""


@dataclass(frozen=True)
class RunFiles:
    """What the run directory holds of steps."""

    path: Path
    records: dict[int, StepRecordFile]
    unreadable: dict[int, str]
    metric_lines: list[tuple[int, dict[str, float]]]
    """Lines of `metrics.jsonl`, in order."""
    malformed_line: int | None
    """The first line of it that is no step's, from 1."""
    weights: list[SealedDirectory]
    checkpoints: list[SealedDirectory]
    steerings: list[SteeringRecord] = field(default_factory=list)
    """Lines of `steering.jsonl`, in order, up to the first that cannot be read."""
    malformed_steering: int | None = None
    """The first line of it that cannot be read, from 1."""
    requests: dict[int, TrainRequest | None] = field(default_factory=dict)
    """What the trainer was asked for, by the number in its file's name; None where it cannot be read."""
    run_record: RunRecordFile | None = None
    """None where it is missing or cannot be read."""
    run_trouble: str | None = None
    """Why it cannot be read."""
    settled: dict[int, GroupResult | None] = field(default_factory=dict)
    """How each group was settled, by the number in its file's name; None where it cannot be read."""
    forked_at: int = 0
    """Steps up to this one were taken by the run that this one was forked from."""
    executions: list[str] = field(default_factory=list)
    """Temporal's ids of the executions that `run.json` says the directory belongs to."""


class EvidenceSource(Protocol):
    """Where an audit reads. Everything is read when it is needed and let go of afterwards."""

    async def read_run(self) -> RunHistory: ...

    async def read_group(self, group: int) -> GroupHistory: ...

    async def read_manifest(self, reference: BlobRef) -> StoredGroup: ...

    async def read_samples(self, reference: BlobRef) -> StoredSamples: ...

    async def read_session(self, session_id: str) -> RecordedSession | None: ...

    async def read_digest(self, session_id: str) -> SessionDigest | None: ...

    async def read_files(self) -> RunFiles: ...

    async def read_played(self, directory: Path, step: int) -> TrainRequest | None:
        """A batch as another run has stored it; None where it cannot be read."""
        ...
