from __future__ import annotations

from everroll.contracts.health import AbortSummary, BudgetState, EpisodesReport
from everroll.contracts.outcomes import Cause, CauseKind
from everroll.contracts.spec import AbortBudgetSpec
from workflows.abort_budget import AbortBudget

SERVER = "http://127.0.0.1:8810"


def report(collected: int = 0, aborted: int = 0, at: float = 0.0, server: str | None = SERVER) -> EpisodesReport:
    cause = Cause(kind=CauseKind.TRANSPORT, error="ReadError", message="reset", server=server)
    aborts = [AbortSummary(cause=cause, count=aborted, first_at=at, last_at=at)] if aborted else []
    return EpisodesReport(group=0, num_collected=collected, aborts=aborts)


def build(**values: float) -> tuple[AbortBudget, BudgetState]:
    state = BudgetState()
    return AbortBudget(AbortBudgetSpec.model_validate({"window": 10, "max_share": 0.5, **values}), state), state


def test_up_to_the_share_is_routine_and_one_more_is_not() -> None:
    budget, _ = build()
    budget.add(report(collected=5, aborted=5))
    assert budget.find_excess() is None
    budget.add(report(aborted=1))
    trouble = budget.find_excess()
    assert trouble is not None
    assert trouble.server == SERVER


def test_the_window_slides() -> None:
    budget, state = build()
    budget.add(report(aborted=5))
    budget.add(report(collected=10))
    assert state.window == "c" * 10
    budget.add(report(aborted=5))
    assert budget.find_excess() is None


def test_a_small_number_of_aborts_at_the_start_is_no_excess() -> None:
    budget, _ = build()
    budget.add(report(aborted=3))
    assert budget.find_excess() is None


def test_one_server_dead_for_too_long() -> None:
    budget, _ = build(dead_seconds=30)
    budget.add(report(aborted=1, at=100.0))
    budget.add(report(aborted=1, at=129.0))
    assert budget.find_excess() is None
    budget.add(report(aborted=1, at=130.0))
    trouble = budget.find_excess()
    assert trouble is not None
    text = budget.describe(trouble)
    assert SERVER in text
    assert "by 3 of them" in text
    assert "first at 1970-01-01 00:01:40 UTC, last at 1970-01-01 00:02:10 UTC" in text
    assert "ReadError" in text


def test_a_success_in_between_clears_the_server() -> None:
    budget, _ = build(dead_seconds=30)
    budget.add(report(aborted=1, at=100.0))
    budget.add(report(collected=1))
    budget.add(report(aborted=1, at=140.0))
    assert budget.find_excess() is None


def test_the_window_alone_cannot_blame_time_on_nobody() -> None:
    budget, _ = build(dead_seconds=30)
    budget.add(report(aborted=1, at=100.0, server=None))
    budget.add(report(aborted=1, at=200.0, server=None))
    assert budget.find_excess() is None


def test_the_worst_server_of_the_window_is_named_not_that_of_the_latest_failure() -> None:
    budget, state = build()
    budget.add(report(aborted=4, at=1.0))
    budget.add(report(collected=1))
    budget.add(report(aborted=2, at=2.0, server="http://127.0.0.1:8820"))
    trouble = budget.find_excess()
    assert trouble is not None
    assert (trouble.server, trouble.count) == (SERVER, 4)
    text = budget.describe(trouble)
    assert f"6 of the last 7 episodes were aborted. {SERVER} is named by 4 of them, first at" in text
    budget.add(report(collected=2))
    budget.add(report(aborted=3, at=3.0, server="http://127.0.0.1:8820"))
    trouble = budget.find_excess()
    assert trouble is not None
    assert (trouble.server, trouble.count) == ("http://127.0.0.1:8820", 5)
    budget.add(report(collected=10))
    assert state.blamed == {}


def test_servers_that_come_and_go_keep_the_state_small() -> None:
    budget, state = build()
    for number in range(1000):
        budget.add(report(aborted=1, server=f"http://127.0.0.1:{number}"))
        budget.add(report(collected=1))
    assert len(state.window) == 10
    assert len(state.blamed) == 5
    assert max(map(ord, state.window)) < 0x110


def test_state_survives_continue_as_new() -> None:
    budget, state = build()
    budget.add(report(collected=4, aborted=5, at=7.0))
    restored = BudgetState.model_validate_json(state.model_dump_json())
    again = AbortBudget(AbortBudgetSpec(window=10, max_share=0.5), restored)
    again.add(report(aborted=1, at=9.0))
    trouble = again.find_excess()
    assert trouble is not None
    assert (trouble.count, trouble.first_at, trouble.last_at) == (6, 7.0, 9.0)
