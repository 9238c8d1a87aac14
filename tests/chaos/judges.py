"""What must be true of a run that was struck, when it is over.

Sampling is deterministic here: a turn that was lost and sampled again is the same one, and so are the weights that come
of it. So these judges do not only compare contents, but also when each turn was recorded, and how many were sampled.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from everroll.audit.report import AuditInputError, AuditReport
from everroll.sessions.reading import RecordedSession, RecordedTurn, open_journal_reader
from tests.chaos.blows import Blow
from tests.chaos.world import SeenTurn, Size, World

Recorded = dict[tuple[int, str], list[float]]
"""When turns were recorded, by depth and by what agents make of the contents so far; Unix seconds."""


class BreachError(Exception):
    """A promise was broken; the text says which. The world's directory holds the evidence."""


async def check_audit(world: World) -> None:
    """The audit passes; of a run that never stopped it has left nothing out, and it counts what such a run has."""
    try:
        report = await world.audit()
    except AuditInputError as error:
        raise BreachError(f"the audit cannot be made: {error}") from error
    if not report.passed:
        text = "; ".join(map(str, report.breaches[:3]))
        raise BreachError(f"the audit found {report.num_breaches} breaches: {text}")
    if report.num_steps != world.size.num_steps:
        raise BreachError(f"the audit counts {report.num_steps} steps of {world.size.num_steps}")
    if world.num_resumes == 0:
        check_nothing_left_out(report, world.size)


def check_nothing_left_out(report: AuditReport, size: Size) -> None:
    """Of a run that was not resumed; an overlapped one may have dropped groups as stale.

    Raises:
        BreachError: something was compared by digest, taken from records alone, or not looked at.
    """
    num_groups = size.num_steps * size.groups_per_step
    if report.fates.get("trained") != num_groups or (size.max_staleness == 0 and len(report.fates) != 1):
        raise BreachError(f"the audit counts groups {report.fates}, not {num_groups} that were trained")
    if report.num_episodes != num_groups * size.episodes_per_group:
        raise BreachError(
            f"the audit compared {report.num_episodes} episodes of {num_groups * size.episodes_per_group}"
        )
    if report.num_by_digest or report.num_without_history:
        raise BreachError(
            f"the audit compared {report.num_by_digest} episodes by digest alone, "
            f"and {report.num_without_history} groups without their history"
        )
    if size.max_staleness == 0 and report.notes:
        raise BreachError(f"the audit could not prove everything: {'; '.join(report.notes)}")


async def check_seen(world: World) -> None:
    """Each turn that an agent saw had been recorded before, and is on record still: the same one (I7).

    An agent that asks again for a turn that is on record gets that one, wherever it runs: no request has two turns.

    Raises:
        BreachError: names the session and the turn.
    """
    seen: defaultdict[str, list[SeenTurn]] = defaultdict(list)
    for turn in world.read_seen():
        seen[turn.session].append(turn)
    journal = open_journal_reader(str(world.journal))
    try:
        for session_id, turns in seen.items():
            session = await journal.read_session(session_id)
            _check_recorded_once(session_id, session)
            recorded = digest_turns(session)
            for turn in turns:
                _check_turn(turn, recorded, clock_moved=world.clock_moved)
    finally:
        await journal.close()
    _check_changed(world.read_seen())


def _check_changed(seen: Iterable[SeenTurn]) -> None:
    digests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for turn in seen:
        digests[turn.session, turn.turn].add(turn.digest)
    for (session, turn_index), found in digests.items():
        if len(found) > 1:
            raise BreachError(f"turn {turn_index} of session {session} was seen with different contents")


def _check_recorded_once(session_id: str, session: RecordedSession | None) -> None:
    prompts = [turn.tokens.prompt_key for turn in (session.turns if session else ())]
    if len(prompts) != len(set(prompts)):
        raise BreachError(f"session {session_id} has {len(prompts)} turns of {len(set(prompts))} requests")


def _check_turn(turn: SeenTurn, recorded: Recorded, *, clock_moved: bool) -> None:
    who = f"turn {turn.turn} of session {turn.session}"
    found = recorded.get((turn.turn, turn.digest))
    if found is None:
        raise BreachError(f"{who} was seen, and is not on record as it was seen")
    if turn.created not in map(int, found):
        raise BreachError(f"{who} was seen as recorded at {turn.created}, and was recorded at {found}")
    if not clock_moved and min(found) > turn.at:
        raise BreachError(f"{who} was seen {min(found) - turn.at:.3f} s before it was recorded")


def digest_turns(session: RecordedSession | None) -> Recorded:
    """The turns of a session, as the agent of chaos runs digests them."""
    found: Recorded = defaultdict(list)
    by_index = {turn.tokens.index: turn for turn in (session.turns if session else ())}
    for turn in by_index.values():
        digest = hashlib.sha256()
        for ancestor in reversed(list(_walk_up(turn, by_index))):
            digest.update((ancestor.reply.get("content") or "").encode())
        found[turn.depth, digest.hexdigest()[:16]].append(turn.created_at)
    return found


def _walk_up(turn: RecordedTurn, by_index: dict[int, RecordedTurn]) -> Iterable[RecordedTurn]:
    yield turn
    while turn.tokens.follows is not None:
        turn = by_index[turn.tokens.follows]
        yield turn


def check_generated(world: World, blows: Sequence[Blow]) -> None:
    """No more turns were sampled without being recorded than can have been under way when `blows` fell.

    Overlapped runs are left out: an engine that takes new weights refuses turns, which are asked for again. So are
    turns that cannot be written because the journal's disk is full.
    """
    most, recorded = count_losable(world.size, blows, world.num_resumes), world.count_recorded_turns()
    lost = count_generated(world) - recorded
    if most is not None and not 0 <= lost <= most:
        raise BreachError(f"{lost} turns were sampled and are not recorded; at most {most} can have been lost")
    if most is None or world.num_resumes or any(map(can_cost_episodes, blows)):
        return
    if recorded != world.size.num_turns:
        raise BreachError(f"{recorded} turns are recorded of {world.size.num_turns}: episodes were begun anew")


def can_cost_episodes(blow: Blow) -> bool:
    """Whether sessions may have been out of reach: an episode that cannot be opened or collected is begun anew."""
    return "session" in blow.text or blow.kind in ("everything", "node-lost")


def count_losable(size: Size, blows: Sequence[Blow], num_resumes: int) -> int | None:
    """Most turns that can be sampled and not recorded; None where there is no bound.

    A turn in flight is lost with the session server, with the engine, and with the connection between them. It goes on
    without its agent, its worker and its workflow. An engine that comes back samples with its first weights until it is
    given the run's, and what it sampled first is thrown away. A run that failed releases its sessions in mid-turn.
    """
    if size.max_staleness > 0 or any(blow.kind == "full journal" for blow in blows):
        return None
    in_flight = size.groups_per_step * size.episodes_per_group
    times = {"session-server": 1, "engine": 2, "link engine": 1}
    return in_flight * (num_resumes + sum(times.get(name, 0) for blow in blows for name in blow.breaks))


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
