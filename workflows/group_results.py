"""From the members of a group to its result. Pure."""

from __future__ import annotations

from everroll.contracts.outcomes import Cause, CauseKind, SampleStatus
from everroll.contracts.rollout import BlobRef, CollectResult, EpisodeOutcome, EpisodeReport, GroupProgress, GroupResult


def merge_outcome(pending: EpisodeOutcome, report: EpisodeReport, collected: CollectResult | None) -> EpisodeOutcome:
    """Report and collection taken together, as a copy of the pending episode, which stays as it is.

    Infrastructure outweighs the agent: when its session or every engine was away, neither its failure nor the reward
    that it made of that is a verdict.
    """
    status, cause = report.status, report.cause
    if collected is not None:
        if collected.cause is not None and collected.cause.server is not None:
            status, cause = collected.status, collected.cause
        elif collected.engine_cause is not None and collected.engine_cause.kind is CauseKind.ENGINE:
            status, cause = SampleStatus.ABORTED, collected.engine_cause
        elif collected.engine_cause is not None and status is SampleStatus.FAILED:
            cause = collected.engine_cause
        elif status is SampleStatus.COMPLETED:
            status, cause = collected.status, collected.cause
    return pending.model_copy(
        update={
            "status": status,
            "prompt_index": report.prompt_index,
            "reward": report.reward,
            "metrics": report.metrics,
            "samples": collected.samples if collected else None,
            "cause": cause,
            "duration_seconds": report.duration_seconds,
        }
    )


def next_draw(outcome: EpisodeOutcome) -> int:
    """What the member's next attempt draws: after an outage the same tokens, otherwise others.

    So a run that had outages ends with the weights of one that had none.
    """
    outage = outcome.status is SampleStatus.ABORTED and outcome.cause is not None and outcome.cause.kind.is_outage
    return outcome.draw if outage else outcome.draw + 1


def build_group_result(
    group: int, progress: GroupProgress, outcomes: list[EpisodeOutcome], manifest: BlobRef | None, dropped: Cause | None
) -> GroupResult:
    """What a run gets to know of a group: its manifest, or why it was dropped, and what it cost."""
    samples = [outcome.samples for outcome in outcomes if outcome.samples is not None]
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    return GroupResult(
        group=group,
        prompt_index=outcomes[0].prompt_index if outcomes else None,
        manifest=manifest,
        dropped=dropped,
        num_episodes=progress.num_episodes,
        num_tokens=sum(ref.num_tokens for ref in samples),
        num_sampled_tokens=sum(ref.num_sampled_tokens for ref in samples),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        min_weight_version=min((ref.min_weight_version for ref in samples), default=None),
        unusable=progress.unusable,
        last_cause=progress.last_cause,
        agent_metrics=mean_metrics(outcomes),
    )


def mean_metrics(outcomes: list[EpisodeOutcome]) -> dict[str, float]:
    """Mean of what agents reported, over the members that did."""
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in sorted(values.items())}


def render_group(result: GroupResult) -> str:
    """A settled group in words, for its page."""
    reward = "none" if result.mean_reward is None else f"{result.mean_reward:.3f}"
    fate = f"dropped ({result.dropped})" if result.dropped else "stored"
    return (
        f"**Group {result.group}**, prompt {result.prompt_index}: {fate}\n\n"
        f"- mean reward: {reward}\n- episodes played: {result.num_episodes}\n"
        f"- sampled tokens: {result.num_sampled_tokens}\n- unusable by cause: {result.unusable or 'none'}"
    )
