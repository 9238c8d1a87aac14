"""The run's own counts of settled groups against what became of each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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

    def check_result(self, result: TrainingRunResult, fates: Mapping[int, str], findings: Findings) -> None:
        """What the run answered at its end."""
        pairs: list[tuple[str, object, object]] = [
            ("groups trained", self.count_trained(fates), result.trained_groups),
            ("groups dropped", self.count_dropped(fates), sort_counts(result.dropped_groups)),
        ]
        for name, expected, found in pairs:
            breach = Breach(
                invariant=Invariant.SETTLED_ONCE,
                message=f"the run's result tells of other {name} than its history",
                expected=str(expected),
                found=str(found),
            )
            findings.expect(TOTALS, expected == found, breach)


def sort_counts(counts: Mapping[str, int]) -> dict[str, int]:
    return {cause: number for cause, number in sorted(counts.items()) if number}


def _count_dropped(fates: Mapping[int, str]) -> Counter[str]:
    return Counter(fate.removeprefix(_DROPPED) for fate in fates.values() if fate.startswith(_DROPPED))
