"""What a person reads of a failure: each cause once, from the outermost to the root."""

from __future__ import annotations

import itertools

from temporalio.exceptions import ActivityError, ApplicationError, FailureError, TimeoutError

from everroll.client import describe_failure
from everroll.contracts.outcomes import Cause, CauseKind

TEXT = "run r cannot start:\n- engine http://e: nobody answers"


def chain(*errors: FailureError) -> FailureError:
    for outer, inner in itertools.pairwise(errors):
        outer.__cause__ = inner
    return errors[0]


def activity_error() -> ActivityError:
    return ActivityError(
        "Activity task failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="w",
        activity_type="prepare_run",
        activity_id="1",
        retry_state=None,
    )


def test_each_cause_is_told_once() -> None:
    """As a run fails: its own failure has its root's words, which the activity's and the exception's repeat."""
    failure = chain(
        ApplicationError(f"{TEXT} [prepare_run, 1 of everroll/r]", type="ConfigurationError"),
        activity_error(),
        ApplicationError(f"{TEXT} [prepare_run, 1 of everroll/r]", type="ConfigurationError"),
        ApplicationError(TEXT, type="ConfigurationError"),
        ApplicationError("[Errno 111] Connection refused", type="ConnectionRefusedError"),
    )
    assert describe_failure(failure) == (
        f"ConfigurationError: {TEXT} [prepare_run, 1 of everroll/r]\n"
        "ConnectionRefusedError: [Errno 111] Connection refused"
    )


def test_another_name_for_the_same_words_is_no_other_cause() -> None:
    words = "POST http://s/sessions answered 500: broken"
    failure = chain(
        ApplicationError(f"{words} [run_episode, e of g]", type="RuntimeError"),
        ApplicationError(words, type="ServerStatusError"),
    )
    assert describe_failure(failure) == f"RuntimeError: {words} [run_episode, e of g]"


def test_short_words_are_not_taken_for_others() -> None:
    failure = chain(ApplicationError("step 1 of 10 failed", type="A"), ApplicationError("10", type="KeyError"))
    assert describe_failure(failure) == "A: step 1 of 10 failed\nKeyError: 10"


def test_a_timeout_names_its_activity() -> None:
    late = TimeoutError("activity Heartbeat timeout", type=None, last_heartbeat_details=[])
    assert describe_failure(chain(activity_error(), late)) == (
        "ActivityError: prepare_run: Activity task failed\nTimeoutError: activity Heartbeat timeout"
    )
    assert describe_failure(None) == ""


def test_a_cause_names_its_exception_once() -> None:
    cause = Cause(kind=CauseKind.AGENT, error="KeyError", message="KeyError: 'tool' (agent.py:3)")
    assert str(cause) == "agent: KeyError: 'tool' (agent.py:3)"
    assert str(cause.model_copy(update={"message": "tool"})) == "agent: KeyError: tool"
