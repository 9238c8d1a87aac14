"""I8: no wait without a bound. Each call that can wait for ever has a limit, or a reason in the list below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("everroll", "workflows", "activities", "worker", "trainer")

_LIMITED_BY_KEYWORD = {
    "wait_condition": ("timeout",),
    "AsyncClient": ("timeout",),
    "Client": ("timeout",),
    "ClientSession": ("timeout",),
    "execute_activity": ("schedule_to_close_timeout",),
    "execute_local_activity": ("schedule_to_close_timeout",),
    "start_child_workflow": ("execution_timeout",),
    "execute_child_workflow": ("execution_timeout",),
    "urlopen": ("timeout",),
}
"""Calls that wait, by name, and what bounds them."""
_ACTIVITIES = ("execute_activity", "execute_local_activity")
_CLIENTS = ("AsyncClient", "Client", "ClientSession")
_BARE = ("wait", "join", "communicate", "acquire", "get", "result")
"""Methods that wait for ever when called without arguments."""

# Where it waits, and why that may be: what bounds it instead, or why it should last as long as it does.
ALLOWED = {
    "workflows/run_groups.py:_start:start_child_workflow": "a group keeps its own deadline, which stands still "
    "while the run is paused",
    "workflows/run_steps.py:_unless_fatal:wait_condition": "what is waited for has its own deadline",
    "workflows/training_run.py:_continue_as_new:wait_condition": "the server confirms starts, publishing has its own "
    "deadline, handlers do not wait",
    "workflows/rollout_group.py:_play_member:wait_condition": "the group's deadline ends it, and the pause's limit",
    "activities/runs.py:await_groups:wait": "Temporal ends the activity by its schedule_to_close",
    "activities/group_waits.py:_await_group:result": "Temporal ends the activity by its schedule_to_close",
    "activities/evaluation.py:await_evaluation:result": "Temporal ends the activity by its schedule_to_close",
    "everroll/evaluate.py:_wait:result": "a caller that wants a result waits as long as it takes; evaluations have "
    "deadlines",
    "activities/training.py:_run:wait": "a step that has begun is finished; Temporal has given the activity up already",
    "everroll/client.py:result:result": "a caller that wants a run's result waits as long as the run takes",
    "everroll/engines/http.py:open_client_session:ClientSession": "each request has its own timeout",
    "everroll/agents.py:_run_command:communicate": "the episode's deadline cancels it and ends the process",
    "worker/__main__.py:serve:wait": "a worker serves until it is told to stop",
    # Processes that stand as long as their user wants them, and threads that wait for work.
    "everroll/cli/demo_run.py:_unless_failed:wait": "follows a run to its end; the stack's failure ends it too",
    "everroll/engines/embedded/door.py:unless_disconnected:wait": "ends with the caller, whose call has a timeout",
    "everroll/engines/embedded/core.py:_run_commands:get": "the engine's thread waits for work",
    "everroll/local/process.py:wait:wait": "a supervisor waits as long as its process lives",
    "everroll/local/process.py:stop:wait": "after SIGKILL, which no process refuses",
    "everroll/local/supervisor.py:_wait_unless_failed:wait": "until all is ready, which has a limit, or one failed",
    "everroll/sessions/postgres_database.py:_write_forever:get": "the journal's thread waits for work",
    "everroll/sessions/sqlite_database.py:_write_forever:get": "the journal's thread waits for work",
    "everroll/sessions/supervisor.py:_supervise:wait": "servers stand until they are told to stop",
    "everroll/sessions/supervisor.py:_run_process:wait": "a supervisor waits as long as its process lives",
    "everroll/sessions/supervisor.py:_stop:wait": "after SIGKILL, which no process refuses",
    "everroll/simulation/engine.py:generate:wait": "a paused engine holds calls, whose callers have timeouts",
    "everroll/simulation/engine.py:_generate:acquire": "a full engine queues calls, whose callers have timeouts",
    "everroll/simulation/engine.py:_spend:wait": "a paused engine holds calls, whose callers have timeouts",
}


def find_unbounded(path: Path) -> Iterator[tuple[int, str]]:
    """Line and `file:function:call` of every wait without a bound."""
    tree = ast.parse(path.read_text())
    scopes = {
        inner: node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }
    awaited = {node.value for node in ast.walk(tree) if isinstance(node, ast.Await)}
    bounded = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and get_name(node) == "wait_for" and len(node.args) + len(node.keywords) > 1
        for argument in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in bounded and is_unbounded(node, node in awaited):
            where = path.relative_to(ROOT).as_posix()
            yield node.lineno, f"{where}:{scopes.get(node, '')}:{get_name(node)}"


def get_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def get_owner(node: ast.Call) -> str:
    """The name before the dot."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else ""


def is_unbounded(node: ast.Call, awaited: bool) -> bool:
    name, keywords = get_name(node), {keyword.arg for keyword in node.keywords}
    if any(is_endless(keyword) for keyword in node.keywords):
        return True
    if None in keywords:  # **options, which the type checker knows more of
        return False
    if name in _CLIENTS and get_owner(node) not in ("httpx", "aiohttp"):
        return False
    if name in _ACTIVITIES and get_owner(node) != "workflow":
        return False
    if name in _LIMITED_BY_KEYWORD:
        return not keywords & set(_LIMITED_BY_KEYWORD[name])
    if name == "wait" and get_owner(node) == "asyncio":
        return "timeout" not in keywords
    if name == "run" and get_owner(node) == "subprocess":
        return "timeout" not in keywords
    is_bare = isinstance(node.func, ast.Attribute) and name in _BARE and not node.args and not keywords
    return is_bare and (awaited or name in ("join", "acquire", "get"))


def is_endless(keyword: ast.keyword) -> bool:
    """`timeout=None`, however it is spelled."""
    is_timeout = keyword.arg is not None and "timeout" in keyword.arg
    return is_timeout and isinstance(keyword.value, ast.Constant) and keyword.value.value is None


def test_no_wait_is_without_a_bound() -> None:
    found = {
        key: line
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, key in find_unbounded(path)
    }
    unexplained = [f"{key} (line {line})" for key, line in found.items() if key not in ALLOWED]
    assert not unexplained, f"waits without a bound: {unexplained}"
    gone = [key for key in ALLOWED if key not in found and (ROOT / key.split(":")[0]).exists()]
    assert not gone, f"reasons for waits that are gone: {gone}"


def test_the_death_of_an_activitys_worker_is_noticed_by_its_heartbeat() -> None:
    """Without one, whoever waits for it waits for the activity's whole time: half a minute or ten."""
    found = [
        f"{path.name}:{call.lineno}"
        for path in sorted((ROOT / "workflows").glob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and get_name(call) == "execute_activity"
        if "heartbeat_timeout" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "await workflow.wait_condition(lambda: done)",
        "await asyncio.wait([task])",
        "await process.wait()",
        "await process.communicate()",
        "await handle.result()",
        "thread.join()",
        "lock.acquire()",
        "httpx.AsyncClient()",
        "aiohttp.ClientSession(headers=headers)",
        "subprocess.run(command)",
        "await workflow.execute_activity(name, start_to_close_timeout=limit)",
        "await client.get(url, timeout=None)",
        "await asyncio.wait_for(event.wait(), timeout=None)",
    ],
)
def test_a_bare_wait_is_found(code: str) -> None:
    body = f"async def f():\n    {code}\n"
    calls = [node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Call)]
    awaited = {node.value for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Await)}
    assert any(is_unbounded(call, bool(awaited)) for call in calls)


@pytest.mark.parametrize(
    "code",
    [
        "await workflow.wait_condition(check, timeout=limit)",
        "await asyncio.wait([task], timeout=1)",
        "await asyncio.wait_for(process.wait(), 3)",
        "thread.join(5)",
        "', '.join(names)",
        "task.result()",
        "httpx.Client(timeout=5)",
        "names.get('key')",
    ],
)
def test_a_bounded_wait_is_not(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "code.py"
    path.write_text(f"async def f():\n    {code}\n")
    assert list(find_unbounded(path)) == []
