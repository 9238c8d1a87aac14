"""Numbers of an audit, and what is to be said besides them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from everroll.audit.account import Account
from everroll.audit.evidence import RunHistory
from everroll.audit.report import Findings
from everroll.audit.resumption import BY_RECORD
from everroll.failures import ConfigurationError
from everroll.prompts import DatasetCache


@dataclass
class Tally:
    """Numbers of one group, or of all."""

    findings: Findings = field(default_factory=Findings)
    num_episodes: int = 0
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    num_by_digest: int = 0
    num_without_history: int = 0

    def add(self, other: Tally) -> None:
        self.num_episodes += other.num_episodes
        self.num_tokens += other.num_tokens
        self.num_sampled_tokens += other.num_sampled_tokens
        self.num_by_digest += other.num_by_digest
        self.num_without_history += other.num_without_history


async def add_notes(history: RunHistory, account: Account, tally: Tally, findings: Findings) -> None:
    """Say what the numbers of an audit do not."""
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
