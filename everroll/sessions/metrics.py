"""What a session server counts of itself, in Prometheus' text form.

Written by hand, since it is a page of lines. Each process counts for itself; several processes behind one address are
scraped at their own ones (`peer_port`), or tell apart by `server`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everroll.sessions.errors import SessionError

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds."""
_ENGINE_GAUGES = {
    "healthy": "everroll_engine_healthy",
    "weight_version": "everroll_engine_weight_version",
    "in_flight": "everroll_engine_calls_in_flight",
}
_ENGINE_COUNTERS = {"calls": "everroll_engine_calls_total", "failed_calls": "everroll_engine_failed_calls_total"}


@dataclass
class Histogram:
    """Durations in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * len(_BUCKETS))
    count: int = 0
    total_seconds: float = 0.0

    def observe(self, seconds: float) -> None:
        self.count += 1
        self.total_seconds += seconds
        for index, bound in enumerate(_BUCKETS):
            if seconds <= bound:
                self.counts[index] += 1
                return


@dataclass
class SessionMetrics:
    """Counted where it happens; all since the process started."""

    turns: Counter[str] = field(default_factory=Counter)
    """Turns answered, by `sampled` and `replayed`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Requests answered with an error, by its kind and status."""
    journal_seconds: Histogram = field(default_factory=Histogram)
    """From handing a turn to the journal until it is durable."""
    relays: Counter[str] = field(default_factory=Counter)
    """Requests passed on to another server, by outcome."""

    def note_turn(self, num_prompt_tokens: int, num_completion_tokens: int, replayed: bool) -> None:
        """The tokens of a turn that is served again are not counted again."""
        self.turns["replayed" if replayed else "sampled"] += 1
        if not replayed:
            self.prompt_tokens += num_prompt_tokens
            self.completion_tokens += num_completion_tokens

    def note_error(self, error: SessionError) -> None:
        self.errors[error.kind, error.status] += 1


@dataclass(frozen=True)
class MetricsPage:
    """Builds the page: what was counted, and what is so now."""

    server_id: str
    metrics: SessionMetrics
    count_sessions: Callable[[], int]
    count_calls: Callable[[], int]
    describe_engines: Callable[[], list[dict[str, Any]]]

    def build(self) -> str:
        metrics = self.metrics
        turns = [({"source": source}, count) for source, count in sorted(metrics.turns.items())]
        tokens = [({"kind": "prompt"}, metrics.prompt_tokens), ({"kind": "completion"}, metrics.completion_tokens)]
        errors = [({"kind": kind, "status": str(status)}, n) for (kind, status), n in sorted(metrics.errors.items())]
        relays = [({"outcome": outcome}, count) for outcome, count in sorted(metrics.relays.items())]
        lines = [
            *self._family("everroll_session_turns_total", "counter", turns),
            *self._family("everroll_session_tokens_total", "counter", tokens),
            *self._family("everroll_session_errors_total", "counter", errors),
            *self._family("everroll_session_relays_total", "counter", relays),
            *self._family("everroll_sessions_open", "gauge", [({}, self.count_sessions())]),
            *self._family("everroll_session_calls_in_flight", "gauge", [({}, self.count_calls())]),
            *self._histogram("everroll_session_journal_seconds", metrics.journal_seconds),
            *self._engines(),
        ]
        return "\n".join(lines) + "\n"

    def _engines(self) -> list[str]:
        engines = self.describe_engines()
        lines = []
        for names, kind in ((_ENGINE_GAUGES, "gauge"), (_ENGINE_COUNTERS, "counter")):
            for key, name in names.items():
                known = [({"engine": each["url"]}, each[key]) for each in engines if each[key] is not None]
                lines += self._family(name, kind, known)
        return lines

    def _family(self, name: str, kind: str, values: Iterable[tuple[Mapping[str, str], float]]) -> list[str]:
        return [f"# TYPE {name} {kind}", *(self._line(name, labels, value) for labels, value in values)]

    def _histogram(self, name: str, histogram: Histogram) -> list[str]:
        lines, below = [f"# TYPE {name} histogram"], 0
        for bound, count in zip(_BUCKETS, histogram.counts, strict=True):
            below += count
            lines.append(self._line(f"{name}_bucket", {"le": f"{bound:g}"}, below))
        lines.append(self._line(f"{name}_bucket", {"le": "+Inf"}, histogram.count))
        lines.append(self._line(f"{name}_sum", {}, histogram.total_seconds))
        lines.append(self._line(f"{name}_count", {}, histogram.count))
        return lines

    def _line(self, name: str, labels: Mapping[str, str], value: float) -> str:
        text = ",".join(f'{key}="{_escape(item)}"' for key, item in {**labels, "server": self.server_id}.items())
        return f"{name}{{{text}}} {int(value) if isinstance(value, bool) else value}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
