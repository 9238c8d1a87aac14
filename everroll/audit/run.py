"""An audit from end to end, group by group: what is in memory is bounded by the groups looked at together."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from temporalio.client import Client

from everroll.audit.account import Account
from everroll.audit.evidence import EvidenceSource, GroupHistory, RunFiles, RunHistory
from everroll.audit.histories import HistoryReader
from everroll.audit.kept import check_kept
from everroll.audit.numbers import check_demanded, check_reference, check_result
from everroll.audit.openness import leave_out_later
from everroll.audit.records import check_dropped, check_settled, check_steerings
from everroll.audit.report import AuditInputError, AuditReport, Breach, Findings, HistoryGoneError, Invariant
from everroll.audit.requests import check_marks, check_requests
from everroll.audit.run_settings import check_run_record
from everroll.audit.settlement import settle_groups
from everroll.audit.sources import RecordedEvidence
from everroll.audit.steps import check_steps
from everroll.audit.stored_batches import check_on_disk
from everroll.audit.tally import Tally, add_notes
from everroll.audit.tokens import EQUAL, TrainedEpisode, check_tokens
from everroll.audit.verdicts import REFERENCES, check_manifest, check_prompts, check_told, find_prompt
from everroll.contracts.rollout import BlobRef, CollectRequest, EpisodeOutcome, GroupManifest
from everroll.sessions.reading import JournalReadError, MalformedSessionError, open_journal_reader

STORED = "blobs are what was written"
_GROUPS_AT_A_TIME = 8
_PRUNED = 'samples that are gone were not compared: train.keep_samples = "replay" lets go of them'

OnProgress = Callable[[int, int], None]
"""Told how many groups of how many have been looked at."""


@dataclass(frozen=True)
class Places:
    """Where the evidence lies. What is None is where the run's own specification says."""

    journal: str
    """Path or URL of the session journal."""
    store_url: str | None = None
    run_dir: Path | None = None


async def audit_run(temporal: Client, run: str, places: Places, on_progress: OnProgress | None = None) -> AuditReport:
    """Audit a run, finished or not.

    Raises:
        AuditInputError: no such run, or a part of the evidence cannot be read.
        ConnectionError: Temporal does not answer.
    """
    try:
        journal = open_journal_reader(places.journal)
    except JournalReadError as error:
        raise AuditInputError(f"{error}; name the session server's journal with --journal") from error
    try:
        spec = (await HistoryReader(temporal, run).read_start()).spec
        run_dir = places.run_dir or Path(spec.run.output_dir) / spec.run.name
        store_url = places.store_url or spec.services.store_url
        try:
            source = RecordedEvidence(temporal, run, journal, store_url, run_dir)
        except ValueError as error:
            raise AuditInputError(str(error)) from error
        return await audit_evidence(source, on_progress)
    finally:
        await journal.close()


async def audit_evidence(source: EvidenceSource, on_progress: OnProgress | None = None) -> AuditReport:
    """Audit evidence from wherever it comes.

    Raises:
        AuditInputError: a part of it cannot be read.
    """
    started = time.monotonic()
    history = await source.read_run()
    findings = Findings()
    account = settle_groups(history, findings)
    tally = Tally()
    is_open = history.state == "running"
    files = await _read_files(source, history, account, findings)
    if files is not None and is_open:
        files = leave_out_later(files, account)
    trained = find_trained(account, files if history.spec.run.mode == "full" else None)
    groups = sorted({*account.results, *trained} if history.spec.run.mode != "train" else account.results)
    scope = _Scope(source, history, account, _find_pruned(history, account, files))
    async with aclosing(_in_order(scope, trained, groups)) as results:
        num_done = 0
        async for found in results:
            findings.merge(found.findings)
            tally.add(found)
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, len(groups))
    if files is not None:
        check_steps(account, files, history.spec.train, findings, is_open=is_open)
        if not is_open:
            check_steerings(history, files, findings)
        check_marks(account, files, findings)
        check_run_record(history, account, files, findings)
        if not is_open:
            check_kept(account, files, findings)
            check_requests(history, account, files, scope.pruned_until, findings)
        if history.spec.run.mode == "full":
            manifests = {group: one.manifest for group, one in trained.items()}
            check_settled(files, account, manifests, findings, is_open=is_open)
            check_dropped(files, account, findings, has_ended_well=history.state == "completed")
    if history.spec.run.mode == "rollout":
        await _check_stored(source, history, account, findings)
    if history.spec.run.mode == "train":
        await check_played(source, history, account, findings)
    await add_notes(history, account, tally, findings)
    return _build_report(history, account, tally, findings, time.monotonic() - started)


async def _read_files(
    source: EvidenceSource, history: RunHistory, account: Account, findings: Findings
) -> RunFiles | None:
    """None where the run has no directory: it only plays, or ended before it took a step, or even had one.

    Raises:
        AuditInputError: steps were taken, and the directory is not there.
    """
    if history.spec.run.mode == "rollout":
        return None
    has_steps = bool(account.requests or account.by_record)
    try:
        files = await source.read_files()
    except AuditInputError as error:
        if has_steps:
            raise
        findings.note(f"the run took no step, and its directory was not looked at: {error}")
        return None
    own = {generation.run_id for generation in history.generations}
    if not has_steps and files.executions and not own & set(files.executions):
        findings.note(f"{files.path} was not looked at: it belongs to an earlier run of this name, and this one failed")
        return None
    return files


async def _check_stored(source: EvidenceSource, history: RunHistory, account: Account, findings: Findings) -> None:
    """What a run that only plays has in its directory: the batches that another one trains."""
    if history.dataset is None:
        return  # it ended before it made a directory its own
    try:
        files = await source.read_files()
    except AuditInputError as error:
        if account.requests:
            findings.note(f"the batches that the run stored were not looked at: {error}")
        return
    check_run_record(history, account, files, findings)
    if history.state != "running":
        check_requests(history, account, files, -1, findings)


def _find_pruned(history: RunHistory, account: Account, files: RunFiles | None) -> float:
    """The newest step whose samples may be gone, as retention has it; infinite where that cannot be told."""
    newest = account.requests[max(account.requests)].train if account.requests else history.spec.train
    sections = [history.spec.train, newest, *(request.train for request in account.requests.values())]
    if all(train.keep_samples == "run" for train in sections):
        return -1
    if files is None or history.state == "running":
        return math.inf
    complete = [directory.step for directory in files.checkpoints if directory.manifest is not None]
    return min(sorted(complete)[-newest.keep_checkpoints :], default=-1)


async def check_played(source: EvidenceSource, history: RunHistory, account: Account, findings: Findings) -> None:
    """Each step's batch against the directory of the run that played it, as far as that is within reach."""
    directory, num_missing = Path(history.spec.run.batches_from or ""), 0
    for _, request in sorted(account.requests.items()):
        stored = await source.read_played(directory, request.step)
        if stored is None:
            num_missing += 1
        else:
            check_on_disk(request, stored, findings)
    if num_missing:
        findings.note(
            f"{num_missing} batches could not be read in {directory}, the directory of the run that played them: they "
            "were compared with what this run was told when it read them"
        )


@dataclass(frozen=True)
class _Scope:
    """What the audit of a group needs of the run."""

    source: EvidenceSource
    history: RunHistory
    account: Account
    pruned_until: float
    """Samples of later steps must be there."""


@dataclass(frozen=True)
class Trained:
    """What a step trained of a group."""

    step: int
    manifest: BlobRef


def find_trained(account: Account, files: RunFiles | None) -> dict[int, Trained]:
    """By group: as the run handed it to the trainer, or, of steps whose history is gone, as the step's record says.

    The steps that a fork begins with are left to an audit of the run that took them.
    """
    trained: dict[int, Trained] = {}
    for step, record in (files.records if files else {}).items():
        if files is not None and files.forked_at < step <= account.by_record:
            trained |= {item.group: Trained(step, item.manifest) for item in record.batch}
    for step, request in account.requests.items():
        here = [item for item in request.batch if account.trained_at.get(item.group) == step]
        trained |= {item.group: Trained(step, item.manifest) for item in here}
    return trained


async def _in_order(scope: _Scope, trained: Mapping[int, Trained], groups: Iterable[int]) -> AsyncGenerator[Tally]:
    """The groups' findings in order, a few groups ahead of the one that is given."""
    waiting: deque[asyncio.Task[Tally]] = deque()
    try:
        for group in groups:
            waiting.append(asyncio.create_task(_audit_group(scope, group, trained.get(group))))
            if len(waiting) >= _GROUPS_AT_A_TIME:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _audit_group(scope: _Scope, group: int, trained: Trained | None) -> Tally:
    tally = Tally()
    account, findings = scope.account, tally.findings
    told = account.results.get(group)
    own: GroupHistory | None = None
    try:
        own = await scope.source.read_group(group)
    except HistoryGoneError:
        tally.num_without_history = 1
    if own is not None:
        if told is not None and group not in account.recorded and not _plays_again(scope, group, own):
            check_told(group, own, told, findings)
        check_prompts(group, own, scope.history.dataset, findings)
    if trained is None or (told is not None and told.manifest is None):
        return tally
    manifest = await _read_manifest(scope, group, trained, own, findings)
    if manifest is None:
        return tally
    spec = scope.history.spec
    num_members = spec.rollout.episodes_per_group
    request = own.request if own is not None else account.dispensed.get(group)
    prompt = find_prompt(request) if request is not None else None
    check_manifest(spec.run.name, group, trained.step, own, manifest, num_members, findings, prompt)
    if told is not None:
        check_result(trained.step, told, manifest.outcomes, findings)
    for outcome in manifest.outcomes:
        episode = own.episodes.get(outcome.key.session_id) if own else None
        collect = episode.collect if episode else None
        max_seq_len = collect.max_seq_len if collect else spec.rollout.max_seq_len
        await _audit_episode(scope, outcome, trained.step, max_seq_len, collect, tally)
    return tally


def _plays_again(scope: _Scope, group: int, own: GroupHistory) -> bool:
    """Whether an open run has dispensed the group once more since its history was read: that history is a newer one."""
    request = scope.account.dispensed.get(group)
    again = request is not None and own.request.first_attempt != request.first_attempt
    return again and scope.history.state == "running"


async def _read_manifest(
    scope: _Scope, group: int, trained: Trained, own: GroupHistory | None, findings: Findings
) -> GroupManifest | None:
    """What the trainer read of a group; where it cannot be read any more, what the group's history says was stored.

    Retention keeps manifests: one that is missing is a breach.
    """
    stored = await scope.source.read_manifest(trained.manifest)
    _expect_stored(stored.trouble, {"step": trained.step, "group": group}, findings)
    known = own.manifest if own is not None else trained.manifest
    if known != trained.manifest and not (known is None and group in scope.account.recorded):
        text = "the trainer was given another manifest than the group stored"
        breach = Breach(invariant=Invariant.VERDICTS, message=text, step=trained.step, group=group)
        breach = breach.model_copy(update={"expected": known.uri if known else "none", "found": trained.manifest.uri})
        findings.add(REFERENCES, breach)
    if stored.manifest is None and own is not None and own.stored is not None:
        outcomes = own.stored.outcomes
        prompt = outcomes[0].prompt_index if outcomes else None
        return GroupManifest(run=own.stored.run, group=own.stored.group, prompt_index=prompt, outcomes=outcomes)
    return stored.manifest


async def _audit_episode(
    scope: _Scope,
    outcome: EpisodeOutcome,
    step: int,
    max_seq_len: int | None,
    collect: CollectRequest | None,
    tally: Tally,
) -> None:
    if outcome.samples is None:
        return  # said already: no verdict
    key, source = outcome.key, scope.source
    who = TrainedEpisode(step, key.group, key.member, key.session_id, max_seq_len)
    stored = await source.read_samples(outcome.samples.blob)
    if stored.missing and step <= scope.pruned_until:
        tally.findings.note(_PRUNED)
        return
    where = {"step": step, "group": key.group, "member": key.member, "session_id": key.session_id}
    _expect_stored(stored.trouble, where, tally.findings)
    if stored.sample_set is None:
        return
    try:
        session = await source.read_session(key.session_id)
        digest = await source.read_digest(key.session_id)
    except MalformedSessionError as error:
        tally.findings.count(Invariant.TOKENS, EQUAL)
        tally.findings.add(EQUAL, who.breach(f"the journal's record is none: {error}"))
        return
    sample_set = stored.sample_set
    by_digest = await asyncio.to_thread(check_tokens, who, sample_set, session, digest, tally.findings)
    check_reference(who, outcome.samples, sample_set, tally.findings)
    if collect is not None:
        check_demanded(who, collect, sample_set, tally.findings)
    tally.num_episodes += 1
    tally.num_by_digest += by_digest
    tally.num_tokens += sum(sample.num_tokens for sample in sample_set.samples)
    tally.num_sampled_tokens += sum(sample.num_sampled_tokens for sample in sample_set.samples)


def _expect_stored(trouble: str | None, where: Mapping[str, object], findings: Findings) -> None:
    breach = Breach.model_validate({"invariant": Invariant.TOKENS, "message": trouble or "", **where})
    findings.expect(STORED, trouble is None, breach)


def _count_fates(history: RunHistory, account: Account) -> dict[str, int]:
    """A run that only plays stores its batches where another trains them."""
    counts = Counter(account.fates.values())
    if history.spec.run.mode == "rollout" and "trained" in counts:
        counts["stored"] = counts.pop("trained")
    return dict(sorted(counts.items()))


def _build_report(
    history: RunHistory, account: Account, tally: Tally, findings: Findings, seconds: float
) -> AuditReport:
    lines = sorted(findings.checks.values(), key=lambda line: line.invariant.value)
    return AuditReport(
        run=history.spec.run.name,
        state=history.state,
        passed=findings.num_breaches == 0,
        num_steps=account.num_steps,
        num_generations=len(history.generations),
        num_groups=len(account.dispensed),
        most_open=account.most_open,
        fates=_count_fates(history, account),
        num_episodes=tally.num_episodes,
        num_tokens=tally.num_tokens,
        num_sampled_tokens=tally.num_sampled_tokens,
        num_by_digest=tally.num_by_digest,
        num_without_history=tally.num_without_history,
        checks=lines,
        breaches=findings.breaches,
        num_breaches=findings.num_breaches,
        notes=findings.notes,
        seconds=seconds,
    )
