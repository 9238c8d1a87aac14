"""What is told of samples and groups in numbers, against the samples and outcomes themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from everroll.audit.report import Breach, Findings, Invariant
from everroll.audit.tokens import VERSIONS, TrainedEpisode
from everroll.contracts.rollout import CollectRequest, EpisodeOutcome, GroupResult, SamplesRef
from everroll.tokens.samples import SampleSet

COUNTED = "samples and groups are what their numbers say"


def check_reference(who: TrainedEpisode, reference: SamplesRef, stored: SampleSet, findings: Findings) -> None:
    """Counts and weight versions on the reference to a blob are those of the samples in it."""
    versions = [sample.weight_versions[sample.loss_mask] for sample in stored.samples]
    sampled = [part for part in versions if part.size]
    found: dict[str, int | None] = {
        "num_samples": len(stored.samples),
        "num_tokens": sum(sample.num_tokens for sample in stored.samples),
        "num_sampled_tokens": sum(sample.num_sampled_tokens for sample in stored.samples),
        "min_weight_version": min((int(part.min()) for part in sampled), default=None),
        "max_weight_version": max((int(part.max()) for part in sampled), default=None),
    }
    known = reference.model_dump()
    name = next((name for name, value in found.items() if known[name] != value), None)
    breach = who.breach("the samples are not as many, or of other weights, than is told of them")
    if name is not None:
        breach = who.breach(breach.message, field=name, expected=str(known[name]), found=str(found[name]))
    findings.expect(COUNTED, name is None, breach)


def check_demanded(who: TrainedEpisode, collect: CollectRequest, stored: SampleSet, findings: Findings) -> None:
    """No token is of weights older than those that were out when the group started."""
    findings.count(Invariant.TOKENS, VERSIONS)
    for index, sample in enumerate(stored.samples):
        versions = sample.weight_versions[sample.loss_mask]
        oldest = int(versions.min()) if versions.size else collect.min_weight_version
        if oldest < collect.min_weight_version:
            values = {"expected": f"at least {collect.min_weight_version}", "found": str(oldest)}
            text = "a token was sampled by older weights than were demanded when the samples were collected"
            findings.add(VERSIONS, who.breach(text, sample=index, field="weight_versions", **values))
            return


def check_result(step: int, told: GroupResult, outcomes: Sequence[EpisodeOutcome], findings: Findings) -> None:
    """What the run was told of a trained group in numbers is what its members come to.

    Numbers that an earlier version did not tell are left out.
    """
    references = [outcome.samples for outcome in outcomes if outcome.samples is not None]
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    wanted: dict[str, int | float | None] = {
        "num_tokens": sum(reference.num_tokens for reference in references),
        "num_sampled_tokens": sum(reference.num_sampled_tokens for reference in references),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "min_weight_version": min((reference.min_weight_version for reference in references), default=None),
        "prompt_index": outcomes[0].prompt_index if outcomes else None,
    }
    found = told.model_dump()
    names = [name for name in wanted if name in told.model_fields_set]
    name = next((name for name in names if repr(found[name]) != repr(wanted[name])), None)
    breach = Breach(
        invariant=Invariant.VERDICTS,
        step=step,
        group=told.group,
        message="the run was told other numbers of the group than its members come to",
        field=name,
    )
    if name is not None:
        breach = breach.model_copy(update={"expected": repr(wanted[name]), "found": repr(found[name])})
    findings.expect(COUNTED, name is None, breach)
