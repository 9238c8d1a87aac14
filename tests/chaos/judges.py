"""What must be true of a run that was struck, when it is over."""

from __future__ import annotations

from collections import Counter, defaultdict

from everroll.audit.report import AuditInputError
from tests.chaos.world import World


class BreachError(Exception):
    """A promise was broken; the text says which. The world's directory holds the evidence."""


async def check_audit(world: World) -> None:
    try:
        report = await world.audit()
    except AuditInputError as error:
        raise BreachError(f"the audit cannot be made: {error}") from error
    if not report.passed:
        text = "; ".join(map(str, report.breaches[:3]))
        raise BreachError(f"the audit found {report.num_breaches} breaches: {text}")
    if report.num_steps != world.size.num_steps:
        raise BreachError(f"the audit counts {report.num_steps} steps of {world.size.num_steps}")


def check_turns(world: World) -> None:
    """An agent that asks again for a turn that it has seen gets the same one, wherever it runs."""
    seen: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for turn in world.read_seen():
        seen[turn.session, turn.turn][turn.digest] += 1
    changed = [key for key, digests in seen.items() if len(digests) > 1]
    if changed:
        raise BreachError(f"turn {changed[0][1]} of session {changed[0][0]} was seen with different contents")


async def check_continued(world: World) -> None:
    """The run's history did continue as new."""
    generations = await world.count_generations()
    if generations < 2:
        raise BreachError(f"the run has {generations} executions: it has not continued as new")


async def check_generated_once(world: World) -> None:
    """The engine was asked for each recorded turn once, and for no other: nothing was repeated."""
    generated, recorded = count_generated(world), world.count_recorded_turns()
    if generated != recorded:
        raise BreachError(f"the engine was asked for {generated} turns, and {recorded} are recorded")
    if recorded != world.size.num_turns:
        raise BreachError(f"{recorded} turns are recorded, of {world.size.num_turns} that the run needs")


def count_generated(world: World) -> int:
    return sum(count for wanted, count in world.links["engine"].counts.items() if b"generate" in wanted)
