"""What an audit says: breaches with the first differing index, counts of what was compared, and notes."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field

from everroll.contracts.base import Payload

MAX_BREACHES = 200
"""Most breaches that a report lists; all are counted."""


class AuditInputError(Exception):
    """There is nothing to audit, or a part of the evidence is gone; the text says which and what to do."""


class HistoryGoneError(AuditInputError):
    """Temporal does not hold a history, or not any more. What it would have shown is left out, and the rest checked."""


class Invariant(StrEnum):
    """The invariants that an audit proves; DESIGN's numbers."""

    SETTLED_ONCE = "I1"
    TOKENS = "I2"
    STEPS = "I3"
    BOUNDS = "I5"
    VERDICTS = "I6"


class Breach(Payload):
    """One place where the evidence contradicts itself. Indices that do not apply are None."""

    invariant: Invariant
    message: str
    step: int | None = None
    group: int | None = None
    member: int | None = None
    session_id: str | None = None
    sample: int | None = None
    position: int | None = None
    """Token of the sample, from 0."""
    field: str | None = None
    expected: str | None = None
    """What the record says."""
    found: str | None = None
    """What was trained, or is there instead."""

    @property
    def where(self) -> str:
        named = (("step", self.step), ("group", self.group), ("member", self.member), ("sample", self.sample))
        parts = [f"{name} {value}" for name, value in named if value is not None]
        if self.position is not None:
            parts.append(f"token {self.position}")
        return ", ".join(parts)

    def __str__(self) -> str:
        values = f": expected {self.expected}, found {self.found}" if self.expected is not None else ""
        where = f"{self.where}: " if self.where else ""
        return f"{self.invariant.value} {where}{self.message}{values}"


class Check(Payload):
    """One line of the table: what was compared, how often, and how often it did not hold."""

    model_config = ConfigDict(frozen=False)

    invariant: Invariant
    what: str
    num_checked: int = 0
    num_breaches: int = 0


class AuditReport(Payload):
    """The result of an audit."""

    model_config = ConfigDict(frozen=False)

    run: str
    state: str
    """Of the workflow: `running`, `completed`, `failed`, ..."""
    passed: bool = True
    num_steps: int = 0
    """Steps applied, as the history tells."""
    num_generations: int = 0
    num_groups: int = 0
    """Groups dispensed."""
    most_open: int = 0
    """Most groups in flight, ready or in training at once, counted as each was dispensed."""
    fates: dict[str, int] = Field(default_factory=dict)
    """Groups by fate: `trained`, `dropped: <cause>`, `in flight`, `ready`, `ended with the run`."""
    num_episodes: int = 0
    """Trained episodes that were compared with their sessions."""
    num_tokens: int = 0
    num_sampled_tokens: int = 0
    num_by_digest: int = 0
    """Of the episodes, those compared by digest alone, because the journal's retention has passed."""
    num_without_history: int = 0
    """Groups of whose own history Temporal has nothing, so that only part of the checks could be made."""
    checks: list[Check] = Field(default_factory=list)
    breaches: list[Breach] = Field(default_factory=list)
    """In order of group, member, sample and token; at most `MAX_BREACHES`."""
    num_breaches: int = 0
    notes: list[str] = Field(default_factory=list)
    """What could not be proved, or is good to know."""
    seconds: float = 0.0


class Findings:
    """Collects what checks find; each check has one line."""

    def __init__(self) -> None:
        self.checks: dict[tuple[Invariant, str], Check] = {}
        self.breaches: list[Breach] = []
        self.notes: list[str] = []
        self.num_breaches = 0

    def count(self, invariant: Invariant, what: str, number: int = 1) -> None:
        """Note that `what` was checked `number` times more."""
        self._line(invariant, what).num_checked += number

    def add(self, what: str, breach: Breach) -> None:
        """Note a breach of the check `what`, which counts as one of those checked already."""
        self._line(breach.invariant, what).num_breaches += 1
        self.num_breaches += 1
        if len(self.breaches) < MAX_BREACHES:
            self.breaches.append(breach)

    def expect(self, what: str, holds: bool, breach: Breach) -> bool:
        """Check once: count it, and note the breach unless it holds."""
        self.count(breach.invariant, what)
        if not holds:
            self.add(what, breach)
        return holds

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Findings) -> None:
        """Take in what was found elsewhere, after what was found here."""
        for (invariant, what), line in other.checks.items():
            own = self._line(invariant, what)
            own.num_checked += line.num_checked
            own.num_breaches += line.num_breaches
        self.num_breaches += other.num_breaches
        self.breaches += other.breaches[: max(0, MAX_BREACHES - len(self.breaches))]
        for text in other.notes:
            self.note(text)

    def _line(self, invariant: Invariant, what: str) -> Check:
        return self.checks.setdefault((invariant, what), Check(invariant=invariant, what=what))
