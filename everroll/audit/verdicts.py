"""I1 and I6 for one group: its own history, what the run was told, the manifest, and what agents reported. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from everroll.audit.attempts import check_attempts
from everroll.audit.evidence import EpisodeHistory, GroupHistory
from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.outcomes import CauseKind, SampleStatus
from everroll.contracts.rollout import DatasetRef, EpisodeKey, EpisodeOutcome, GroupManifest, GroupRequest, GroupResult
from everroll.prompts import compute_prompt_index

PROMPTS = "episodes play the prompt that is their group's turn"
TOLD = "groups end as the run was told"
VERDICTS = "trained episodes have a verdict"
REWARDS = "rewards equal what the episodes reported"
REFERENCES = "manifests name the samples that were collected"
MEMBERS = "trained groups are whole"
_I1, _I6 = Invariant.SETTLED_ONCE, Invariant.VERDICTS


def check_prompts(group: int, history: GroupHistory, dataset: DatasetRef | None, findings: Findings) -> None:
    """Every episode played its group's prompt of the data set that the run began with.

    That is the prompt of the deterministic order, or the one that a curriculum chose.
    """
    for session_id, episode in history.episodes.items():
        key, reference = episode.request.key, episode.request.dataset
        where = {"group": group, "member": key.member, "session_id": session_id}
        breach = _breach(_I1, "the episode was given another data set", where, dataset, reference)
        if not findings.expect(PROMPTS, reference == dataset, breach):
            continue
        found = episode.report.prompt_index if episode.report else None
        wanted = find_prompt(history.request)
        breach = _breach(_I1, "the episode played another prompt than its group's", where, wanted, found)
        has_played = episode.report is not None and episode.report.status is SampleStatus.COMPLETED
        findings.expect(PROMPTS, found == wanted or (found is None and not has_played), breach)


def find_prompt(request: GroupRequest) -> int:
    """The prompt that is a group's turn: as the curriculum chose, or by the deterministic order."""
    if request.prompt_index is not None:
        return request.prompt_index
    data = request.dataset
    return compute_prompt_index(request.group, data.num_prompts, data.seed, data.shuffle)


def check_told(group: int, history: GroupHistory, told: GroupResult, findings: Findings) -> None:
    """The run settled the group with the result that the group itself gave."""
    breach = _breach(_I1, "the run was told another result than the group gave", {"group": group}, "", "a result")
    if history.result is None:
        findings.expect(TOLD, False, breach.model_copy(update={"expected": "none: it has not completed"}))
        return
    own, heard = history.result.model_dump(), told.model_dump()
    field = next((name for name in own if own[name] != heard[name]), None)
    if field is not None:
        breach = breach.model_copy(
            update={"field": field, "expected": str(own[field])[:200], "found": str(heard[field])[:200]}
        )
    findings.expect(TOLD, field is None, breach)


def check_manifest(
    run: str,
    group: int,
    step: int,
    history: GroupHistory | None,
    manifest: GroupManifest,
    num_members: int,
    findings: Findings,
    prompt: int | None = None,
) -> None:
    """What the trainer read of a group is what its history says, and every member of it may be trained.

    Without the history, what the manifest says of itself is all there is to check, and the `prompt` that is the group's
    turn, where that is known.
    """
    where: Mapping[str, object] = {"step": step, "group": group}
    members = [outcome.key.member for outcome in manifest.outcomes]
    breach = _breach(_I6, "the group's members are not all there, once each", where, list(range(num_members)), members)
    findings.expect(MEMBERS, members == list(range(num_members)) and manifest.group == group, breach)
    if history is not None and history.stored is not None and history.stored.outcomes != manifest.outcomes:
        findings.add(REFERENCES, _find_difference(where, history.stored.outcomes, manifest.outcomes))
    _check_prompt(where, manifest, prompt, findings)
    for member, outcome in enumerate(manifest.outcomes):
        wanted = EpisodeKey(run=run, group=group, member=member, attempt=outcome.key.attempt)
        breach = _breach(_I6, "the outcome is another episode's", {**where, "member": member}, wanted, outcome.key)
        findings.expect(MEMBERS, outcome.key == wanted and manifest.run == run, breach)
        _check_outcome(step, group, history, outcome, findings)


def _find_difference(
    where: Mapping[str, object], known: Sequence[EpisodeOutcome], found: Sequence[EpisodeOutcome]
) -> Breach:
    """Where a manifest first differs from what the group handed over."""
    text = "the manifest is not what the group handed to the store"
    for member, (left, right) in enumerate(zip(known, found, strict=False)):
        ours, theirs = left.model_dump(mode="json"), right.model_dump(mode="json")
        name = next((name for name in ours if ours[name] != theirs[name]), None)
        if name is not None:
            breach = _breach(_I6, text, {**where, "member": member}, str(ours[name])[:200], str(theirs[name])[:200])
            return breach.model_copy(update={"field": name})
    return _breach(_I6, text, where, f"{len(known)} members", f"{len(found)} members")


def _check_prompt(where: Mapping[str, object], manifest: GroupManifest, prompt: int | None, findings: Findings) -> None:
    """The manifest and all its members name one prompt, and it is the group's; earlier versions name none."""
    named = [manifest.prompt_index, *(outcome.prompt_index for outcome in manifest.outcomes)]
    wanted = next((index for index in named if index is not None), None) if prompt is None else prompt
    found = next((index for index in named if index != wanted), wanted)
    breach = _breach(_I1, "the manifest names another prompt than its group's", where, wanted, found)
    findings.expect(PROMPTS, set(named) in ({wanted}, {None}), breach.model_copy(update={"field": "prompt_index"}))


def _check_outcome(
    step: int, group: int, history: GroupHistory | None, outcome: EpisodeOutcome, findings: Findings
) -> None:
    session_id = outcome.key.session_id
    where = {"step": step, "group": group, "member": outcome.key.member, "session_id": session_id}
    if history is None:
        trouble = _find_no_reward(outcome)
        breach = _breach(_I6, "an episode without a verdict is trained", where, "completed or truncated", trouble)
        findings.expect(VERDICTS, trouble is None, breach)
        return
    episode = history.episodes.get(session_id)
    trouble = _find_no_verdict(outcome, episode)
    breach = _breach(_I6, "an episode without a verdict is trained", where, "completed or truncated", trouble)
    findings.expect(VERDICTS, trouble is None, breach)
    if episode is None or episode.report is None:
        breach = _breach(_I6, "the group's history knows no report of the episode", where, "a report", "none")
        findings.expect(REWARDS, False, breach)
        return
    check_attempts(step, history, outcome, findings)
    reported = episode.report.reward
    breach = _breach(_I6, "the reward is not what the episode reported", where, repr(reported), repr(outcome.reward))
    findings.expect(REWARDS, _is_same(reported, outcome.reward), breach.model_copy(update={"field": "reward"}))
    known = episode.collected.samples if episode.collected else None
    breach = _breach(
        _I6,
        "the samples are not those that were collected from the episode's session",
        where,
        known.blob.uri if known else "none",
        outcome.samples.blob.uri if outcome.samples else "none",
    )
    findings.expect(REFERENCES, known == outcome.samples, breach)


def _find_no_reward(outcome: EpisodeOutcome) -> str | None:
    """Why an outcome must not be trained, by what it says of itself; None if it may."""
    if not outcome.status.has_verdict:
        return outcome.status.value
    if outcome.reward is None or not math.isfinite(outcome.reward):
        return f"reward {outcome.reward}"
    return None


def _find_no_verdict(outcome: EpisodeOutcome, episode: EpisodeHistory | None) -> str | None:
    """Why an outcome must not be trained; None if it may."""
    trouble = _find_no_reward(outcome)
    if trouble is not None:
        return trouble
    if episode is None or episode.report is None or episode.collected is None:
        return "an episode that did not end, or was not collected"
    if episode.report.status is not SampleStatus.COMPLETED:
        return f"{outcome.status.value}, where the episode reported {episode.report.status.value}"
    if not episode.collected.status.has_verdict:
        return f"{outcome.status.value}, where its collection gave {episode.collected.status.value}"
    cause = episode.collected.engine_cause
    if cause is not None and cause.kind is CauseKind.ENGINE:
        return f"{outcome.status.value}, where its last model call failed: {cause}"
    return None


def _is_same(reported: float | None, trained: float | None) -> bool:
    return reported is not None and trained is not None and reported.hex() == trained.hex()


def _breach(invariant: Invariant, message: str, where: Mapping[str, object], expected: object, found: object) -> Breach:
    return Breach.model_validate(
        {"invariant": invariant, "message": message, **where, "expected": str(expected), "found": str(found)}
    )
