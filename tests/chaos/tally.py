"""What was struck how often in all rounds, and how that ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from tests.chaos.plan import Round
from tests.chaos.rounds import Told


class Tally:
    """Counts, by the names of strikes: kinds and chosen moments."""

    def __init__(self) -> None:
        self._planned: Counter[str] = Counter()
        self._struck: Counter[str] = Counter()
        self._breaches: Counter[str] = Counter()
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._num_rounds = self._num_breaches = 0

    def note(self, played: Round, told: Told) -> None:
        """A round that passed."""
        self._num_rounds += 1
        for strike in played.strikes:
            self._planned[strike.name] += 1
        for name in told.struck:
            self._struck[name] += 1
            self._seconds[name].append(told.seconds)

    def note_breach(self, played: Round) -> None:
        self._num_rounds += 1
        self._num_breaches += 1
        for strike in played.strikes:
            self._planned[strike.name] += 1
            self._breaches[strike.name] += 1

    def find_missed(self) -> list[str]:
        """What was planned, and came to pass in no round."""
        return sorted(name for name in self._planned if not self._struck[name] and not self._breaches[name])

    def has_planned(self, names: Iterable[str]) -> bool:
        """Whether all of these had their turn."""
        return all(self._planned[name] for name in names)

    def describe(self) -> str:
        """A table in Markdown. Seconds are of whole rounds that passed, with all their strikes."""
        lines = [
            f"{self._num_rounds} rounds, {self._struck.total()} strikes, {self._num_breaches} breaches",
            "",
            "| strike | planned | came to pass | in rounds with a breach | seconds of its rounds, mean |",
            "|---|---|---|---|---|",
        ]
        for name in sorted(self._planned):
            seconds = self._seconds[name]
            mean = f"{sum(seconds) / len(seconds):.0f}" if seconds else ""
            lines.append(f"| {name} | {self._planned[name]} | {self._struck[name]} | {self._breaches[name]} | {mean} |")
        return "\n".join(lines)
