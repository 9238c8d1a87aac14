"""An audit from end to end, group by group: what is in memory is bounded by the groups looked at together."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from temporalio.client import Client

from everroll.audit.account import Account
from everroll.audit.evidence import EvidenceSource, GroupHistory, RunFiles, RunHistory
from everroll.audit.histories import HistoryReader
from everroll.audit.records import check_settled, check_steerings
from everroll.audit.report import AuditInputError, AuditReport, Breach, Findings, HistoryGoneError, Invariant
from everroll.audit.resumption import BY_RECORD
from everroll.audit.settlement import settle_groups
from everroll.audit.sources import RecordedEvidence
from everroll.audit.steps import check_steps
from everroll.audit.tokens import EQUAL, TrainedEpisode, check_tokens
from everroll.audit.verdicts import REFERENCES, check_manifest, check_prompts, check_told
from everroll.contracts.rollout import BlobRef, EpisodeOutcome
from everroll.failures import ConfigurationError
from everroll.prompts import DatasetCache
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
    tally = _Tally()
    steps = account.requests or account.by_record
    files = await source.read_files() if steps and history.spec.run.mode != "rollout" else None
    trained = find_trained(account, files if history.spec.run.mode == "full" else None)
    groups = sorted({*account.results, *trained} if history.spec.run.mode != "train" else account.results)
    async with aclosing(_in_order(source, history, account, trained, groups)) as results:
        num_done = 0
        async for found in results:
            findings.merge(found.findings)
            tally.add(found)
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, len(groups))
    if files is not None:
        is_open = history.state == "running"
        check_steps(account, files, history.spec.train, findings, is_open=is_open)
        if not is_open:
            check_steerings(history, files, findings)
        if history.spec.run.mode == "full":
            check_settled(files, {group: one.manifest for group, one in trained.items()}, findings)
    await _add_notes(history, account, tally, findings)
    return _build_report(history, account, tally, findings, time.monotonic() - started)


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


@dataclass
class _Tally:
    """Numbers of one group, or of all."""

    findings: Findings = field(default_factory=Findings)
    num_episodes: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    num_by_digest: int = 0
    num_without_history: int = 0

    def add(self, other: _Tally) -> None:
        self.num_episodes += other.num_episodes
        self.num_tokens += other.num_tokens
        self.num_sampled_tokens += other.num_sampled_tokens
        self.num_by_digest += other.num_by_digest
        self.num_without_history += other.num_without_history


async def _in_order(
    source: EvidenceSource,
    history: RunHistory,
    account: Account,
    trained: Mapping[int, Trained],
    groups: Iterable[int],
) -> AsyncGenerator[_Tally]:
    """The groups' findings in order, a few groups ahead of the one that is given."""
    waiting: deque[asyncio.Task[_Tally]] = deque()
    try:
        for group in groups:
            work = _audit_group(source, history, account, group, trained.get(group))
            waiting.append(asyncio.create_task(work))
            if len(waiting) >= _GROUPS_AT_A_TIME:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _audit_group(
    source: EvidenceSource, history: RunHistory, account: Account, group: int, trained: Trained | None
) -> _Tally:
    tally = _Tally()
    told = account.results.get(group)
    own: GroupHistory | None = None
    try:
        own = await source.read_group(group)
    except HistoryGoneError:
        tally.num_without_history = 1
    if own is not None:
        if told is not None and group not in account.recorded:
            check_told(group, own, told, tally.findings)
        check_prompts(group, own, history.dataset, tally.findings)
    if trained is None or (told is not None and told.manifest is None):
        return tally
    step = trained.step
    stored = await source.read_manifest(trained.manifest)
    if stored.missing and history.spec.train.keep_samples == "replay":
        tally.findings.note(_PRUNED)
        return tally
    where = {"step": step, "group": group}
    _expect_stored(stored.trouble, where, tally.findings)
    known = own.manifest if own is not None else trained.manifest
    if known != trained.manifest and not (known is None and group in account.recorded):
        text = "the trainer was given another manifest than the group stored"
        breach = Breach(invariant=Invariant.VERDICTS, message=text, step=step, group=group)
        tally.findings.add(REFERENCES, breach)
    if stored.manifest is None:
        return tally
    pruned = history.spec.train.keep_samples == "replay"
    check_manifest(group, step, own, stored.manifest, history.spec.rollout.episodes_per_group, tally.findings)
    for outcome in stored.manifest.outcomes:
        episode = own.episodes.get(outcome.key.session_id) if own else None
        collect = episode.collect if episode else None
        max_seq_len = collect.max_seq_len if collect else history.spec.rollout.max_seq_len
        await _audit_episode(source, outcome, step, max_seq_len, pruned, tally)
    return tally


async def _audit_episode(
    source: EvidenceSource, outcome: EpisodeOutcome, step: int, max_seq_len: int | None, pruned: bool, tally: _Tally
) -> None:
    if outcome.samples is None:
        return  # said already: no verdict
    key = outcome.key
    who = TrainedEpisode(step, key.group, key.member, key.session_id, max_seq_len)
    stored = await source.read_samples(outcome.samples.blob)
    if stored.missing and pruned:
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
    tally.num_episodes += 1
    tally.num_by_digest += by_digest
    tally.num_tokens += sum(sample.num_tokens for sample in sample_set.samples)
    tally.num_sampled_tokens += sum(sample.num_sampled_tokens for sample in sample_set.samples)


def _expect_stored(trouble: str | None, where: Mapping[str, object], findings: Findings) -> None:
    breach = Breach.model_validate({"invariant": Invariant.TOKENS, "message": trouble or "", **where})
    findings.expect(STORED, trouble is None, breach)


async def _add_notes(history: RunHistory, account: Account, tally: _Tally, findings: Findings) -> None:
    if tally.num_by_digest:
        findings.note(
            f"{tally.num_by_digest} of {tally.num_episodes} episodes: the journal's retention has passed and their "
            "rows are gone; their samples were compared with the digest kept at release"
        )
    if history.spec.run.mode == "train":
        source = history.spec.run.batches_from
        findings.note(f"its groups were played by the run in {source}: audit that one for prompts, tokens and verdicts")
    by_record = sum(fate == BY_RECORD for fate in account.fates.values())
    if any(generation.restores for generation in history.generations):
        findings.note(f"the run was resumed from its directory at step {account.by_record}")
    if history.is_cut:
        findings.note(
            "Temporal does not hold the run's first executions any more (the namespace's retention has passed, or they "
            "were deleted): the order in which prompts were dispensed and steps taken until then was not checked"
        )
    if by_record:
        findings.note(
            f"{by_record} groups were settled when this Temporal server's history of the run begins: that they were "
            "settled once is proved by the records in the run directory alone"
        )
    if tally.num_without_history:
        findings.note(
            f"of {tally.num_without_history} groups Temporal has no history of their own (the namespace's retention "
            "has passed, they were deleted, or another server had it): which prompt they played, and that their "
            "rewards are those that the agents reported, was not checked; what was trained of them was compared with "
            "journal and store all the same"
        )
    if history.state == "running":
        findings.note("the run is open: this covers what had settled when its history was read")
    ended = sum(fate == "ended with the run" for fate in account.fates.values())
    if ended:
        findings.note(f"{ended} groups had not settled when the run ended ({history.state}); they were not trained")
    if history.dataset is not None:
        try:
            await asyncio.to_thread(DatasetCache().get, history.dataset)
        except ConfigurationError as error:
            findings.note(f"the prompts themselves could not be looked at: {error}")


def _count_fates(history: RunHistory, account: Account) -> dict[str, int]:
    """A run that only plays stores its batches where another trains them."""
    counts = Counter(account.fates.values())
    if history.spec.run.mode == "rollout" and "trained" in counts:
        counts["stored"] = counts.pop("trained")
    return dict(sorted(counts.items()))


def _build_report(
    history: RunHistory, account: Account, tally: _Tally, findings: Findings, seconds: float
) -> AuditReport:
    lines = sorted(findings.checks.values(), key=lambda line: line.invariant.value)
    return AuditReport(
        run=history.spec.run.name,
        state=history.state,
        passed=findings.num_breaches == 0,
        num_steps=account.num_steps,
        num_generations=len(history.generations),
        num_groups=len(account.dispensed),
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
