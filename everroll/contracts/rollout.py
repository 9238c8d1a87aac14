"""Requests and results of episodes, collection and groups."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from everroll.contracts.base import Payload
from everroll.contracts.health import EpisodesReport, HoldRequest
from everroll.contracts.names import session_id
from everroll.contracts.outcomes import Cause, SampleStatus
from everroll.contracts.spec import AgentSpec, RolloutSection, SamplingSpec


class BlobRef(Payload):
    """Reference to a write-once blob in the store; the hash is checked on every read."""

    uri: str
    sha256: str
    num_bytes: int


class DatasetRef(Payload):
    """A data set as every worker must see it: the fingerprint is checked before a prompt is used."""

    path: str | list[str]
    """As in the run file: paths, globs and URLs."""
    fingerprint: str
    """sha256 over the prompts in order, however their files are laid out."""
    num_prompts: int
    seed: int
    shuffle: bool


class EpisodeKey(Payload):
    """Identity of one attempt at one episode."""

    run: str
    group: int
    member: int
    attempt: int = 0
    """Counts refills; retries of an activity keep it."""
    evaluation: str | None = None
    """Label of the evaluation it belongs to, whose groups are numbered by prompt; None: it is played for training."""

    @property
    def session_id(self) -> str:
        own = session_id(self.run, self.group, self.member, self.attempt)
        return own if self.evaluation is None else f"{own}-{self.evaluation}"

    def __str__(self) -> str:
        where = f"run {self.run} group {self.group} member {self.member} attempt {self.attempt}"
        return where if self.evaluation is None else f"{where} of evaluation {self.evaluation}"


class EpisodeRequest(Payload):
    """Input of `run_episode`."""

    key: EpisodeKey
    dataset: DatasetRef
    agent: AgentSpec
    sampling: SamplingSpec
    seed: int
    session_url: str
    timeout_seconds: float
    transport_attempts: int = 3
    prompt_index: int | None = None
    """The prompt that a curriculum chose; None: that of the deterministic order."""
    min_weight_version: int = 0
    """No turn may be sampled by older weights: the version that was out when the group started."""


class EpisodeReport(Payload):
    """Result of `run_episode`: small, whatever the agent did."""

    key: EpisodeKey
    status: SampleStatus
    """COMPLETED, FAILED (the agent raised) or ABORTED (no session could be had)."""
    prompt_index: int | None = None
    """None when the episode never got so far."""
    reward: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    cause: Cause | None = None
    duration_seconds: float = 0.0


class CollectRequest(Payload):
    """Input of `collect_samples`."""

    key: EpisodeKey
    session_url: str
    store_url: str
    max_seq_len: int | None = None
    transport_attempts: int = 3
    min_weight_version: int = 0
    """Tokens of older weights are refused; the session server samples none."""


class SamplesRef(Payload):
    """The stored samples of one episode."""

    blob: BlobRef
    num_samples: int
    num_tokens: int
    num_sampled_tokens: int
    min_weight_version: int
    max_weight_version: int


class CollectResult(Payload):
    """Result of `collect_samples`."""

    key: EpisodeKey
    status: SampleStatus
    """COMPLETED, TRUNCATED or ABORTED."""
    samples: SamplesRef | None = None
    """None exactly when ABORTED."""
    cause: Cause | None = None
    engine_cause: Cause | None = None
    """Set when the session's last model call failed in the engines (kind `engine`), or was refused by one (`data`)."""


class EpisodeOutcome(Payload):
    """One attempt at one episode: PENDING, and then a copy with what became of it. The pending one is never changed."""

    key: EpisodeKey
    status: SampleStatus
    prompt_index: int | None = None
    """None when the episode never got so far."""
    reward: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: SamplesRef | None = None
    cause: Cause | None = None
    duration_seconds: float = 0.0
    draw: int = 0
    """How many earlier attempts ended for a reason of their own; each such one makes the next draw other tokens."""

    @property
    def is_trainable(self) -> bool:
        return self.status.has_verdict and self.reward is not None and self.samples is not None


class GroupProgress(Payload):
    """What a group carries through continue-as-new, which comes when no episode of it is under way."""

    model_config = ConfigDict(frozen=False)

    members: list[EpisodeOutcome]
    """One per member, ordered by member: PENDING until it is settled; a pending one's key holds its next attempt."""
    num_episodes: int = 0
    unusable: dict[str, int] = Field(default_factory=dict)
    last_cause: Cause | None = None
    started_at: float
    """Unix seconds."""
    remaining_seconds: float
    """Until the group's deadline, time on hold not counted."""


class GroupRequest(Payload):
    """Input of the `RolloutGroup` workflow."""

    run: str
    group: int
    weight_version: int
    """Version published when the group was started."""
    dataset: DatasetRef
    rollout: RolloutSection
    seed: int
    session_url: str
    store_url: str
    task_queue: str
    hold: HoldRequest = HoldRequest(number=0, held=False)
    """Whether to start on hold, because the run is paused."""
    progress: GroupProgress | None = None
    """Set when the group continues as new."""
    prompt_index: int | None = None
    """The prompt that a curriculum chose; None: that of the deterministic order."""
    run_dir: str | None = None
    """Where the group records how it was settled, before it reports; None: nowhere."""
    first_attempt: int = 0
    """Where its members' attempts begin: beyond those of the group that an earlier execution of the run started."""


class StoreGroupRequest(Payload):
    """Input of `store_group`: write the group's manifest, and the record that it is settled."""

    run: str
    group: int
    store_url: str
    outcomes: list[EpisodeOutcome]
    """One per member, ordered by member."""
    run_dir: str | None = None
    """Where to record the group as settled; None: nowhere."""
    result: GroupResult | None = None
    """What to record of it, the manifest left out."""


class GroupManifest(Payload):
    """What the store holds of a trainable group; the trainer reads it."""

    schema_version: int = 1
    run: str
    group: int
    prompt_index: int | None = None
    outcomes: list[EpisodeOutcome]
    """One per member, ordered by member; all trainable."""


class GroupResult(Payload):
    """Result of the `RolloutGroup` workflow."""

    group: int
    prompt_index: int | None = None
    """None when no member lived to tell."""
    manifest: BlobRef | None = None
    """None exactly when the group was dropped."""
    dropped: Cause | None = None
    num_episodes: int = 0
    """Episodes played, refills included."""
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    mean_reward: float | None = None
    """Mean over the members that have a reward."""
    min_weight_version: int | None = None
    unusable: dict[str, int] = Field(default_factory=dict)
    """Aborted and failed episodes by cause kind."""
    last_cause: Cause | None = None
    """The latest of them, for people."""
    agent_metrics: dict[str, float] = Field(default_factory=dict)
    """Means over members of what the agents reported."""
    duration_seconds: float = 0.0
    report: EpisodesReport | None = None
    """How its episodes ended, as far as it was not reported before."""

    @property
    def is_trainable(self) -> bool:
        return self.manifest is not None


class ReleaseRequest(Payload):
    """Input of `release_sessions`."""

    session_url: str
    session_ids: list[str]
    ended_run: str = ""
    """Run to say of that it has ended, so that the retention of its sessions begins; empty for none."""


class ReleaseResult(Payload):
    released: int
    failed: int
    last_error: str = ""


class AwaitGroupsRequest(Payload):
    """Input of `await_groups`: wait for groups that an earlier generation of the run started."""

    run: str
    groups: list[int]


class AwaitGroupsResult(Payload):
    """Those that have ended, at least one of them; the others are to be awaited again."""

    results: list[GroupResult]


class EndGroupRequest(Payload):
    """Signal of a run to a group that it no longer waits for: end the episodes and settle as dropped for this cause."""

    cause: Cause
