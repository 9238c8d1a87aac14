"""Requests and results of evaluations."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import ConfigDict, Field

from everroll.contracts.base import Payload
from everroll.contracts.health import HoldRequest
from everroll.contracts.names import EVALUATION_NAME_PATTERN, evaluation_label, evaluation_workflow_id
from everroll.contracts.outcomes import Cause
from everroll.contracts.rollout import BlobRef, DatasetRef, EpisodeKey, EpisodeOutcome
from everroll.contracts.spec import DataPaths, EvalSection, RolloutSection, RunSpec, ServicesSection
from everroll.contracts.steering import SteerRequest

MAX_RECENT_EVALUATIONS = 20


class Estimate(Payload):
    """A mean over prompts, with its 95 % interval."""

    value: float
    low: float
    high: float
    num_prompts: int
    """Prompts that it is a mean over."""

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


class EvaluationRecord(Payload):
    """Result of the `Evaluation` workflow, and one line of `<run_dir>/evaluations.jsonl`."""

    name: str
    """Which set of prompts."""
    version: int
    """The weight version that was out when it started, and that it is the result of."""
    requested: bool = False
    """True if a person asked for it."""
    failure: str | None = None
    """Why there is no result; then the numbers mean nothing."""
    complete: bool = True
    """False if its deadline passed before every episode was played."""
    fingerprint: str = ""
    """sha256 over the prompts: results are comparable where it is equal."""
    num_prompts: int = 0
    episodes_per_prompt: int = 0
    num_episodes: int = 0
    """Episodes with a verdict; the numbers below are over these."""
    lost: dict[str, int] = Field(default_factory=dict)
    """Episodes without a verdict, refills used up, by cause kind. They count nowhere, not as 0 either."""
    unusable: dict[str, int] = Field(default_factory=dict)
    """Attempts that were aborted or failed, by cause kind, those that a refill made good included."""
    last_cause: Cause | None = None
    mean_reward: Estimate | None = None
    """None without a single verdict."""
    pass_reward: float = 1.0
    pass_at: dict[str, Estimate] = Field(default_factory=dict)
    """pass@k by k."""
    min_weight_version: int | None = None
    max_weight_version: int | None = None
    """Versions that its tokens were sampled by: the same two, unless weights moved meanwhile."""
    num_exact_episodes: int = 0
    """Episodes sampled by `version` alone."""
    mean_sampled_tokens: float = 0.0
    """Per episode."""
    agent_metrics: dict[str, float] = Field(default_factory=dict)
    started_at: float = 0.0
    """Unix seconds."""
    duration_seconds: float = 0.0
    episodes: BlobRef | None = None
    """Every episode's outcome, one JSON object a line."""

    def describe(self) -> str:
        """One line for people."""
        title = f"{self.name}, version {self.version}"
        if self.failure is not None:
            return f"{title}: failed: {self.failure}"
        if self.mean_reward is None:
            return f"{title}: no episode has a verdict, {_list_counts(self.lost)}"
        parts = [f"reward {self.mean_reward}", *(f"pass@{k} {rate}" for k, rate in self.pass_at.items())]
        parts.append(f"{self.num_episodes} episodes of {self.num_prompts} prompts")
        if self.lost:
            parts.append(f"without a verdict {_list_counts(self.lost)}")
        if self.num_exact_episodes < self.num_episodes:
            parts.append(f"sampled by versions {self.min_weight_version} to {self.max_weight_version}")
        if not self.complete:
            parts.append("ended by its deadline")
        return f"{title}: {', '.join(parts)}"


class EvaluationProgress(Payload):
    """What an evaluation carries through continue-as-new, which comes when no episode of it is under way."""

    model_config = ConfigDict(frozen=False)

    dataset: DatasetRef | None = None
    """None until the prompts have been read."""
    num_prompts: int = 0
    """Prompts that are played: the whole set, or fewer."""
    next_episode: int = 0
    """Cursor: episode n is the (n div num_prompts)-th of prompt n mod num_prompts."""
    again: list[EpisodeKey] = Field(default_factory=list)
    """Refills that were due when it continued as new."""
    parts: list[BlobRef] = Field(default_factory=list)
    """Stored outcomes."""
    num_settled: int = 0
    """Episodes played to the end, with a verdict or lost."""
    num_verdicts: int = 0
    sum_rewards: float = 0.0
    """Over those with a verdict, to show while it runs."""
    lost: dict[str, int] = Field(default_factory=dict)
    unusable: dict[str, int] = Field(default_factory=dict)
    last_cause: Cause | None = None
    started_at: float
    """Unix seconds."""
    remaining_seconds: float
    """Until its deadline, time on hold not counted."""


class EvaluationRequest(Payload):
    """Input of the `Evaluation` workflow."""

    run: str
    run_dir: str
    name: str
    version: int
    path: DataPaths
    eval: EvalSection
    rollout: RolloutSection
    """The run's, with the evaluation's agent and sampling values in it."""
    services: ServicesSection
    seed: int
    requested: bool = False
    weights_path: str | None = None
    """Publish these as `version` first; None: the engines have them."""
    hold: HoldRequest = HoldRequest(number=0, held=False)
    """Whether to start on hold, because the run is paused."""
    progress: EvaluationProgress | None = None
    """Set when it continues as new."""

    @property
    def label(self) -> str:
        return evaluation_label(self.name, self.version)

    @property
    def workflow_id(self) -> str:
        return evaluation_workflow_id(self.run, self.name, self.version)


class OpenEvaluationRequest(Payload):
    """Input of `open_evaluation`: read the prompts."""

    path: DataPaths


class StoreEpisodesRequest(Payload):
    """Input of `store_episodes`: outcomes of an evaluation, as they come in."""

    run: str
    label: str
    store_url: str
    outcomes: list[EpisodeOutcome]


class FinishEvaluationRequest(Payload):
    """Input of `finish_evaluation`: compute the numbers, and write the line into `evaluations.jsonl` once."""

    run: str
    run_dir: str
    store_url: str
    parts: list[BlobRef] = Field(default_factory=list)
    record: EvaluationRecord
    """All that the workflow knows; the numbers are still missing."""


class AwaitEvaluationRequest(Payload):
    """Input of `await_evaluation`: wait for one that an earlier generation of the run started."""

    workflow_id: str
    name: str
    version: int


class EvaluateRequest(SteerRequest):
    """Input of the update `evaluate`: evaluate the weights that are out, now."""

    name: str | None = None
    """One set only; None: all that the run file names."""
    path: DataPaths | None = None
    """Other prompts than the run file's, as a set of the name `name`, or `other`."""
    episodes_per_prompt: Annotated[int, Field(ge=1, le=1024)] | None = None
    max_prompts: Annotated[int, Field(ge=1)] | None = None


class EvaluateResult(Payload):
    """Answer of the update `evaluate`."""

    version: int
    workflow_ids: list[str]


class EvaluationStart(Payload):
    """An evaluation that a run waits for."""

    name: str
    version: int
    started_at: float
    """Unix seconds."""


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items()))


# What a run file and a person ask for, brought together; workflows and clients need it alike.


def select_sets(section: EvalSection, request: EvaluateRequest) -> dict[str, DataPaths]:
    """The sets that a request means, by name."""
    if request.path is not None:
        return {request.name or "other": request.path}
    paths = section.named_paths
    return paths if request.name is None else {request.name: paths[request.name]}


def find_request_fault(section: EvalSection, request: EvaluateRequest) -> str | None:
    """Why a request does not go with the run file."""
    paths = section.named_paths
    if request.path is not None and request.name in paths:
        return f"the run file has a set {request.name!r} already; give the other prompts another name"
    if request.path is not None:
        valid = request.name is None or re.match(EVALUATION_NAME_PATTERN, request.name) is not None
        return None if valid else f"not a name of a set: {request.name!r} (letters, digits and '_')"
    if not paths:
        return "the run file has no [eval] with `path` or `sets`; name prompts with --path"
    if request.name is not None and request.name not in paths:
        return f"no set {request.name!r}; there are {', '.join(sorted(paths))}"
    return None


def apply_request(section: EvalSection, request: EvaluateRequest) -> EvalSection:
    """The section with the request's numbers in it.

    Raises:
        pydantic.ValidationError: they are out of bounds.
    """
    asked = {"episodes_per_prompt": request.episodes_per_prompt, "max_prompts": request.max_prompts}
    changes = {key: value for key, value in asked.items() if value is not None}
    return EvalSection.model_validate({**section.model_dump(), **changes})


def build_evaluation_request(
    spec: RunSpec, name: str, path: DataPaths, section: EvalSection, version: int
) -> EvaluationRequest:
    """What an evaluation of a run needs to know, whoever starts it."""
    changes = {"agent": section.agent or spec.rollout.agent, "sampling": section.sampling or spec.rollout.sampling}
    return EvaluationRequest(
        run=spec.run.name,
        run_dir=f"{spec.run.output_dir}/{spec.run.name}",
        name=name,
        version=version,
        path=path,
        eval=section,
        rollout=spec.rollout.model_copy(update=changes),
        services=spec.services,
        seed=spec.run.seed,
    )
