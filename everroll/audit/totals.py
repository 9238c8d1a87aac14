"""The run's own counts of settled groups against what became of each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.training import RunState, TrainingRunResult

TOTALS = "the run's result counts every group by what became of it"
_DROPPED = "dropped: "


class Totals:
    """Groups settled by fate, with those that only a state tells of: before a resume, or before the history begins."""

    def __init__(self) -> None:
        self._trained_before = 0
        self._dropped_before: Counter[str] = Counter()

    def begin(self, state: RunState, fates: Mapping[int, str]) -> None:
        """Take over the counts of a state; `fates` are those known besides."""
        self._trained_before = state.trained_groups - list(fates.values()).count("trained")
        self._dropped_before = Counter(state.dropped_groups)
        self._dropped_before.subtract(_count_dropped(fates))

    def count_trained(self, fates: Mapping[int, str]) -> int:
        return list(fates.values()).count("trained") + self._trained_before

    def count_dropped(self, fates: Mapping[int, str]) -> dict[str, int]:
        """By cause."""
        counts = Counter(self._dropped_before)
        counts.update(_count_dropped(fates))
        return {cause: number for cause, number in sorted(counts.items()) if number}

    def check_result(
        self, result: TrainingRunResult, fates: Mapping[int, str], findings: Findings, unheard: Set[int] = frozenset()
    ) -> None:
        """What the run answered at its end.

        Groups that may be `unheard` settled while a stopped run came to its end: it counts one or not, as it listened
        still or ended the group itself.
        """
        trained = self.count_trained(fates)
        findings.expect(TOTALS, trained == result.trained_groups, _breach("trained", trained, result.trained_groups))
        least = Counter(self.count_dropped({group: fate for group, fate in fates.items() if group not in unheard}))
        most, found = Counter(self.count_dropped(fates)), Counter(result.dropped_groups)
        told = str(sort_counts(least)) if least == most else f"{sort_counts(least)} to {sort_counts(most)}"
        breach = _breach("dropped", told, sort_counts(found))
        findings.expect(TOTALS, least <= found <= most, breach)


def _breach(what: str, expected: object, found: object) -> Breach:
    return Breach(
        invariant=Invariant.SETTLED_ONCE,
        message=f"the run's result tells of other groups {what} than its history",
        expected=str(expected),
        found=str(found),
    )


def sort_counts(counts: Mapping[str, int]) -> dict[str, int]:
    return {cause: number for cause, number in sorted(counts.items()) if number}


def _count_dropped(fates: Mapping[int, str]) -> Counter[str]:
    return Counter(fate.removeprefix(_DROPPED) for fate in fates.values() if fate.startswith(_DROPPED))
