"""Timeouts and retry policies of every activity and child workflow, in one place.

Terminal failures arrive as non-retryable `ApplicationError`s. What is retried without end are lost workers; the bound
is time (`schedule_to_close`), never a number of attempts, because deploys count as attempts.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio.common import RetryPolicy

from everroll.contracts.outcomes import CauseKind, ErrorType
from everroll.contracts.spec import RolloutSection

RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=0.5),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=[error_type.value for error_type in ErrorType],
)

# A call whose transient failures the workflow counts by itself: Temporal retries lost workers and deadlines only.
RETRY_LOST_WORKERS = RetryPolicy(
    initial_interval=timedelta(seconds=0.5),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=10),
    non_retryable_error_types=[*(error_type.value for error_type in ErrorType), *(kind.value for kind in CauseKind)],
)

# An activity of weeks outlives many workers, and starts again soon after the last as after the first.
RETRY_WATCH = RetryPolicy(initial_interval=timedelta(seconds=1), backoff_coefficient=1.0)

# Exceptions of workflow code that fail the workflow instead of retrying its task for ever. Non-determinism is not among
# them: there the task waits for the right code.
FAILURE_EXCEPTION_TYPES: list[type[BaseException]] = [
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    ExceptionGroup,
]

LIGHT_START_TO_CLOSE = timedelta(seconds=30)
LIGHT_SCHEDULE_TO_CLOSE = timedelta(minutes=15)
LIGHT_HEARTBEAT = timedelta(seconds=5)
"""What is a matter of milliseconds waits no longer than this when its worker dies in the middle of it."""
RELEASE_SCHEDULE_TO_CLOSE = timedelta(seconds=60)
RELEASE_AFTER_FAILURE = timedelta(seconds=10)
"""A failure is not held back for longer by a server that does not answer."""
PREPARE_START_TO_CLOSE = timedelta(minutes=10)
PREPARE_SCHEDULE_TO_CLOSE = timedelta(minutes=20)
PREPARE_HEARTBEAT = timedelta(seconds=10)
PREPARE_TRAINER_SCHEDULE_TO_CLOSE = timedelta(hours=2)
PUBLISH_HEARTBEAT = timedelta(seconds=5)
AWAIT_GROUP_HEARTBEAT = timedelta(seconds=10)
EVALUATION_GRACE = timedelta(hours=1)
"""On top of an evaluation's deadline: its prompts are read before, its numbers computed after."""
_CALL_LIMIT = timedelta(seconds=180)
"""Longest that one call to the session server can take: the sum of the HTTP client's timeouts, and back-off."""
_ACTIVITY_GRACE = timedelta(seconds=30)
ATTEMPTS_ALLOWANCE = 10
"""How many times a step's or a publish's own deadline may pass, lost workers included, before the run fails."""

MAX_STARTING_GROUPS = 8
"""Starts of groups that may be unconfirmed at once. The server makes them one after the other, since each holds the
run: with hundreds in one workflow task it takes too long, and fails; with thirty, a busy server puts off those that
have waited for longest again and again."""
MAX_STARTING_GROUPS_ONCE = 32
"""The bound of runs that were begun while it was this high."""
FEW_STARTING_GROUPS = "few-starting-groups"
"""Name of the change in histories."""

AWAIT_SERVER_HEARTBEAT = timedelta(seconds=10)
WATCH_ENGINES_HEARTBEAT = timedelta(seconds=5)
"""Short: when worker and engine were lost together, the next worker notices that the engine is another no sooner."""
WATCH_ENGINES_LIMIT = timedelta(days=7)
"""Then the watch is begun anew."""
PAUSE_GRACE = timedelta(minutes=5)
"""What waits for the end of a pause gives up so long after the pause itself should have ended."""
MAX_AWAITS = 16
"""Activities that await the groups of an earlier generation; each holds one of the worker's slots."""
GROUPS_PER_AWAIT = 32
"""Groups that one of them awaits at least, if there are so many."""
CANCEL_GRACE = timedelta(minutes=2)
"""How long cancelled episodes are waited for, so that no session is released under one."""
SETTLE_ALLOWANCE = timedelta(minutes=30)
"""What a group may take to end its episodes, to be stored and to release its sessions, all retries included."""
SURVEY_FIRST = timedelta(seconds=20)
"""After one to two of these without progress the run asks what it waits for; the time doubles up to `SURVEY_MAX`."""
SURVEY_MAX = timedelta(minutes=15)
WATCH_BACKOFF_MAX = timedelta(minutes=15)
_WATCH_BACKOFF_SECONDS = 1.0
_MAX_REFILL_BACKOFF_SECONDS = 60.0
_PUBLISH_BACKOFF_SECONDS = (0.5, 10.0)
_PUBLISH_TRIES = 100
"""About so many failures in `dead_seconds`, however long that is: each costs a dozen events."""
_MAX_RELAPSE_BACKOFF_SECONDS = 3600.0


def refill_backoff_seconds(first: float, attempt: int) -> float:
    """Wait before a member is sampled again after infrastructure failed."""
    return min(first * 2.0**attempt, max(first, _MAX_REFILL_BACKOFF_SECONDS))


def publish_backoff_seconds(num_failures: int, dead_seconds: float) -> float:
    """Wait before weights are published again after an engine did not answer."""
    first, longest = _PUBLISH_BACKOFF_SECONDS
    return min(first * 2.0 ** min(num_failures, 20), max(longest, dead_seconds / _PUBLISH_TRIES))


def watch_backoff_seconds(num_losses: int) -> float:
    """Wait before engines are given their weights once more that have lost them so many times in short succession."""
    if num_losses == 0:
        return 0.0
    return min(_WATCH_BACKOFF_SECONDS * 2.0 ** min(num_losses, 20), WATCH_BACKOFF_MAX.total_seconds())


def relapse_backoff_seconds(probe_seconds: float, relapses: int) -> float:
    """Wait before a server is probed that answered so many probes and did not work all the same."""
    return min(probe_seconds * 2.0 ** min(relapses, 20), _MAX_RELAPSE_BACKOFF_SECONDS) if relapses else 0.0


def calls_limit(rollout: RolloutSection) -> timedelta:
    """Time for all attempts at one call: they end by themselves before Temporal ends them."""
    return _CALL_LIMIT * rollout.collect_attempts + _ACTIVITY_GRACE


def episode_start_to_close(rollout: RolloutSection) -> timedelta:
    """The episode's own deadline, which the activity enforces itself, and the opening of its session."""
    return timedelta(seconds=rollout.episode_timeout_seconds) + calls_limit(rollout)


def episode_schedule_to_close(rollout: RolloutSection) -> timedelta:
    """With all retries after lost workers, and the wait for a worker."""
    return timedelta(seconds=rollout.group_timeout_seconds) + calls_limit(rollout)


def group_limit(rollout: RolloutSection) -> timedelta:
    """Longest life of a group: its deadline, the longest time on hold, and what it may take to settle."""
    seconds = rollout.group_timeout_seconds + rollout.abort_budget.max_pause_seconds
    return timedelta(seconds=seconds) + SETTLE_ALLOWANCE
