"""When a process that ended by itself is started again, and when that is given up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RestartPolicy:
    """Limits of restarting one process."""

    first_delay_seconds: float = 0.25
    max_delay_seconds: float = 10.0
    max_failed_starts: int = 5
    """Give up after so many ends in a row without ever having been healthy."""
    max_crashes: int = 30
    """Give up after so many ends within the window, healthy in between or not."""
    window_seconds: float = 300.0


@dataclass
class CrashRecord:
    """Ends of one process so far."""

    policy: RestartPolicy
    failed_starts: int = 0
    crashes: list[float] = field(default_factory=list)
    """Times of the ends within the window, in seconds of a monotonic clock."""

    def add(self, now_seconds: float, *, was_healthy: bool) -> float | None:
        """Note an end; returns the delay before the next start, or None to give up.

        The delay doubles with each failed start in a row; a process that was healthy starts again almost at once,
        unless it crashes again and again.
        """
        policy = self.policy
        self.failed_starts = 0 if was_healthy else self.failed_starts + 1
        self.crashes = [time for time in self.crashes if now_seconds - time <= policy.window_seconds]
        self.crashes.append(now_seconds)
        if self.failed_starts >= policy.max_failed_starts or len(self.crashes) >= policy.max_crashes:
            return None
        recent = sum(now_seconds - time <= policy.max_delay_seconds for time in self.crashes)
        exponent = max(self.failed_starts, recent) - 1
        return float(min(policy.first_delay_seconds * 2**exponent, policy.max_delay_seconds))
