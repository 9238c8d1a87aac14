"""Requests and results of training and publishing, the state of a run, and what `status` answers."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field

from everroll.contracts.base import Payload
from everroll.contracts.evaluation import EvaluationRecord, EvaluationStart
from everroll.contracts.health import BudgetState, Pause, Survey
from everroll.contracts.outcomes import Cause
from everroll.contracts.rollout import BlobRef, DatasetRef, GroupResult
from everroll.contracts.spec import EngineKind, ModelSection, RunSpec, TrainSection
from everroll.contracts.steering import JsonValue, SteeringRecord, Text

MAX_RECENT_STEPS = 50


class GroupBatchItem(Payload):
    """One group of a training batch."""

    group: int
    manifest: BlobRef


class PrepareTrainerRequest(Payload):
    """Input of `prepare_trainer`: make checkpoint 0 from the user's model if the run has none yet."""

    run: str
    run_dir: str
    seed: int
    model: ModelSection
    train: TrainSection


class Weights(Payload):
    """Weights that engines can load: a directory in Hugging Face layout."""

    version: int
    path: str


class LedgerMark(Payload):
    """Where the run's ledger stood when a batch was taken: with all marks up to a step, the cursor as of that step."""

    next_group: int
    """Index of the next group to start."""
    dropped: list[int] = Field(default_factory=list)
    """Groups settled as dropped since the previous step's mark."""


class TrainRequest(Payload):
    """Input of `train_step`: turn version `step - 1` into version `step`."""

    run: str
    run_dir: str
    step: int
    """Optimizer step to take, counted from 1."""
    seed: int
    store_url: str
    batch: list[GroupBatchItem]
    """Ordered by group index."""
    model: ModelSection
    train: TrainSection
    mark: LedgerMark | None = None
    """Kept with the step's record."""
    played_by: str | None = None
    """The run whose groups these are; None: `run` itself."""


class TrainResult(Payload):
    """Result of `train_step`."""

    step: int
    weights: Weights
    metrics: dict[str, float]
    applied: bool = True
    """False if this step had been applied by an earlier attempt and was only looked up."""


class PublishRequest(Payload):
    """Input of `publish_weights`: bring every engine to this version. Idempotent."""

    weights: Weights
    engine_urls: list[str]
    timeout_seconds: float
    engine_kind: EngineKind = "auto"
    first: bool = False
    """Nobody has published for this run yet: an engine's version number may be another run's, or another model's."""


class PublishResult(Payload):
    version: int
    seconds_by_engine: dict[str, float] = Field(default_factory=dict)
    """Only engines that had to be updated."""


class ResumeRequest(Payload):
    """How a run that has ended goes on."""

    from_file: bool = False
    """The request's spec is what the user wants from now on; otherwise the run directory's holds."""
    changes: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings to change, as in the update `set`."""
    by: Text = ""
    reason: Text = ""


class ForkOrigin(Payload):
    """Where a forked run comes from."""

    run: str
    run_dir: str
    step: int
    """The fork's weights are those of this step."""


class PrepareRunRequest(Payload):
    """Input of `prepare_run`: preflight, the data set's fingerprint, and the claim to the run directory."""

    spec: RunSpec
    execution_id: str = ""
    """Temporal's id of the execution that began it; the run directory belongs to that one."""
    resume: ResumeRequest | None = None
    fork: ForkOrigin | None = None


class PrepareRunResult(Payload):
    dataset: DatasetRef


class RestoreRunRequest(Payload):
    """Input of `restore_run`: make a run's state from what lies in its directory."""

    run: str
    run_dir: str
    version: int
    """The trainer's newest applied step."""
    end_groups: bool = False
    """Groups of an earlier execution that still play are ended; otherwise the run takes them over."""


class RecordRunRequest(Payload):
    """Input of `record_run`: write into the run directory what must outlive Temporal's history."""

    run_dir: str
    settled: list[GroupResult] = Field(default_factory=list)
    """Groups that were dropped."""
    steerings: list[SteeringRecord] = Field(default_factory=list)
    spec: RunSpec | None = None
    """What holds from now on, if that changed."""


class Phase(StrEnum):
    """What a run is doing now."""

    PREPARING = "preparing"
    ROLLOUT = "rollout"
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    """All steps are done, and the last evaluation runs to its end."""
    PAUSED = "paused"
    COMPLETED = "completed"
    STOPPED = "stopped"
    CANCELED = "canceled"
    FAILED = "failed"


class StepRecord(Payload):
    """One finished optimizer step, for people."""

    step: int
    weight_version: int
    groups: list[int]
    mean_reward: float
    num_episodes: int
    num_tokens: int
    num_sampled_tokens: int
    dropped: dict[str, int] = Field(default_factory=dict)
    """Groups dropped while this batch was gathered, by cause kind."""
    unusable: dict[str, int] = Field(default_factory=dict)
    """Aborted and failed episodes while this batch was gathered, by cause kind."""
    rollout_seconds: float = 0.0
    train_seconds: float = 0.0
    publish_seconds: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)

    @property
    def seconds(self) -> tuple[float, float, float] | None:
        """Of rollout, training and publishing. None of a step that was taken before a resume: its times are not on
        record."""
        found = (self.rollout_seconds, self.train_seconds, self.publish_seconds)
        return found if any(found) else None


class WatchState(Payload):
    """What the watchdog remembers; carried through continue-as-new."""

    model_config = ConfigDict(frozen=False)

    patience_seconds: float | None = None
    """How long to wait for progress before the next survey; grows while there is none. None: the first."""
    survey: Survey | None = None
    """The last one, unless there was progress since."""


class RunState(Payload):
    """Everything that `TrainingRun` carries through continue-as-new; the one contract that its owner mutates."""

    model_config = ConfigDict(frozen=False)

    dataset: DatasetRef | None = None
    step: int = 0
    """Optimizer steps applied and published."""
    weights: Weights | None = None
    next_group: int = 0
    """Cursor: index of the next group to start. Group n plays prompt n of the deterministic order."""
    replay: list[int] = Field(default_factory=list)
    """Groups that were dispensed before and are to be played again, in order: after a resume, those that never settled,
    and those found stale, where that is the policy. They start before any new one."""
    num_resumes: int = 0
    """Times resumed or forked."""
    unmarked_dropped: list[int] = Field(default_factory=list)
    """Groups dropped since the last batch was taken."""
    unrecorded: list[GroupResult] = Field(default_factory=list)
    """Groups that the run itself dropped, not yet written to the run directory."""
    skipping: dict[int, Cause] = Field(default_factory=dict)
    """Groups in flight that are to be dropped, whatever they still bring."""
    steerings: list[SteeringRecord] = Field(default_factory=list)
    """What was asked of the run, oldest first, at most `MAX_STEERINGS`."""
    num_steerings: int = 0
    unrecorded_steerings: list[SteeringRecord] = Field(default_factory=list)
    planned: dict[int, int] = Field(default_factory=dict)
    """With a curriculum: the prompt chosen for each group that is not settled."""
    planned_until: int = 0
    """With a curriculum: the first group whose prompt is not chosen yet."""
    in_flight: dict[int, int] = Field(default_factory=dict)
    """Groups started and not settled, with the weight version at their start."""
    resampled: dict[int, int] = Field(default_factory=dict)
    """How many times groups that are not settled were sampled again for being stale."""
    ready: list[GroupResult] = Field(default_factory=list)
    """Trainable groups not yet trained, ordered by group index."""
    trained_groups: int = 0
    dropped_groups: dict[str, int] = Field(default_factory=dict)
    """Settled as dropped, by cause kind."""
    unusable_episodes: dict[str, int] = Field(default_factory=dict)
    """Aborted and failed episodes, by cause kind."""
    last_cause: Cause | None = None
    consecutive_dropped: int = 0
    """Groups dropped since the last trainable one."""
    num_episodes: int = 0
    num_sampled_tokens: int = 0
    recent_steps: list[StepRecord] = Field(default_factory=list)
    """The latest steps, oldest first, at most `MAX_RECENT_STEPS`; `<run_dir>/metrics.jsonl` has them all."""
    pending_dropped: dict[str, int] = Field(default_factory=dict)
    pending_unusable: dict[str, int] = Field(default_factory=dict)
    """Counts since the last finished step."""
    generation: int = 0
    """Times continued as new."""
    budget: BudgetState = Field(default_factory=BudgetState)
    pause: Pause | None = None
    hold_number: int = 0
    """Counts changes between pausing and going on."""
    stop_requested: bool = False
    rollout_started_at: float | None = None
    """When the run began to gather the batch that it still lacks, in Unix seconds."""
    watch: WatchState = Field(default_factory=WatchState)
    evaluated_version: int = -1
    """Newest version whose evaluations by schedule were started."""
    evaluations_in_flight: dict[str, EvaluationStart] = Field(default_factory=dict)
    """By label."""
    evaluations: list[EvaluationRecord] = Field(default_factory=list)
    """The latest, oldest first; `<run_dir>/evaluations.jsonl` has them all."""


class TrainingRunRequest(Payload):
    """Input of the `TrainingRun` workflow. Start with `spec` alone."""

    spec: RunSpec
    state: RunState | None = None
    resume: ResumeRequest | None = None
    """Go on with a run that has ended, from its run directory."""
    fork: ForkOrigin | None = None
    """Begin from a step of another run."""


class RestoreRunResult(Payload):
    """What a resumed or forked run starts from."""

    spec: RunSpec
    state: RunState


class TrainingRunResult(Payload):
    """Result of the `TrainingRun` workflow."""

    run: str
    steps: int
    weights: Weights | None
    trained_groups: int
    dropped_groups: dict[str, int]
    unusable_episodes: dict[str, int]
    stopped: bool = False
    """True if it was asked to stop before its last step."""
    evaluations: list[EvaluationRecord] = Field(default_factory=list)
    """The latest, oldest first."""


class RunStatus(Payload):
    """Answer to the query `status`."""

    run: str
    phase: Phase
    step: int
    num_steps: int
    weight_version: int
    groups_in_flight: list[int]
    groups_ready: int
    groups_wanted: int
    next_group: int
    trained_groups: int
    dropped_groups: dict[str, int]
    unusable_episodes: dict[str, int]
    last_cause: Cause | None
    num_episodes: int
    num_sampled_tokens: int
    mean_reward: float | None
    """Of the last finished step."""
    recent_steps: list[StepRecord]
    generation: int = 0
    stop_requested: bool = False
    pause: Pause | None = None
    survey: Survey | None = None
    """What the run waits for; taken when nothing was settled for a while."""
    evaluations: list[EvaluationRecord] = Field(default_factory=list)
    """The latest, oldest first."""
    evaluations_in_flight: list[EvaluationStart] = Field(default_factory=list)
    num_resumes: int = 0
    phase_since: float | None = None
    """When it came to that phase, in Unix seconds."""
    steerings: list[SteeringRecord] = Field(default_factory=list)
    """What was asked of the run, oldest first; the latest of them."""
    ready_groups: list[int] = Field(default_factory=list)
    """Groups that wait to be trained."""
