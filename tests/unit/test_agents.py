from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from aiohttp import web

from everroll.agents import AgentClients, AgentError, Episode, check_result, load_agent_function, run_agent
from everroll.contracts.rollout import EpisodeKey
from everroll.contracts.spec import AgentSpec
from everroll.failures import ConfigurationError
from everroll.http_client import FaithfulTransport
from everroll.prompts import Prompt


@pytest.fixture
def episode() -> Episode:
    return build_episode(AgentClients(httpx.AsyncClient()))


def build_episode(clients: AgentClients, base_url: str = "http://127.0.0.1:1/v1") -> Episode:
    prompt = Prompt(index=0, messages=[{"role": "user", "content": "hi"}], label=5)
    return Episode(
        key=EpisodeKey(run="r", group=0, member=0),
        prompt=prompt,
        base_url=base_url,
        api_key="secret-key",
        seed=1,
        args={"x": 1},
        clients=clients,
    )


async def agent_with_metrics(episode: Episode) -> dict[str, float]:
    return {"reward": 0.5, "label": episode.prompt.label}


def blocking_agent(episode: Episode) -> float:
    return float(episode.args["x"])


def agent_without_episode() -> float:
    return 1.0


async def raising_agent(episode: Episode) -> float:
    raise KeyError("tool")


async def test_function_agents(episode: Episode) -> None:
    result = await run_agent(AgentSpec(function="tests.unit.test_agents:agent_with_metrics"), episode)
    assert result.reward == 0.5
    assert result.metrics == {"label": 5.0}
    result = await run_agent(AgentSpec(function="tests.unit.test_agents:blocking_agent"), episode)
    assert result.reward == 1.0


async def test_what_an_agent_raises_is_an_agent_error(episode: Episode) -> None:
    with pytest.raises(AgentError, match="KeyError: 'tool'") as caught:
        await run_agent(AgentSpec(function="tests.unit.test_agents:raising_agent"), episode)
    assert isinstance(caught.value.__cause__, KeyError)


def parsing_agent(episode: Episode) -> float:
    return float(read_answer("{"))


def read_answer(text: str) -> str:
    return str(json.loads(text)["answer"])


@pytest.mark.parametrize(
    ("agent", "function"),
    [(raising_agent, raising_agent), (parsing_agent, read_answer)],
    ids=["its own", "a library's"],
)
async def test_the_innermost_line_of_the_users_code_is_named(
    episode: Episode, agent: Callable[[Episode], Any], function: Callable[..., Any]
) -> None:
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(AgentError, match=rf"\(.*test_agents\.py:{line}\)$"):
        await run_agent(AgentSpec(function=f"tests.unit.test_agents:{agent.__name__}"), episode)


async def test_a_call_that_fails_before_the_users_code_names_no_line(episode: Episode) -> None:
    with pytest.raises(AgentError, match=r"takes 0 positional arguments but 1 was given$"):
        await run_agent(AgentSpec(function="tests.unit.test_agents:agent_without_episode"), episode)


async def test_an_agent_is_imported_once_and_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, episode: Episode
) -> None:
    """What it needs may take many seconds to import; heartbeats go on meanwhile."""
    gate = types.ModuleType("import_gate")
    gate.began, gate.may_end, gate.times = threading.Event(), threading.Event(), []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "import_gate", gate)
    lines = ["import import_gate as gate", "gate.times.append(1)", "gate.began.set()"]
    lines += ["assert gate.may_end.wait(20), 'the event loop waits for this import'", "run = lambda episode: 0.25"]
    (tmp_path / "slow_to_import.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    spec = AgentSpec(function="slow_to_import:run")
    playing = [asyncio.create_task(run_agent(spec, episode)) for _ in range(3)]
    assert await asyncio.to_thread(gate.began.wait, 60)
    gate.may_end.set()
    assert [result.reward for result in await asyncio.gather(*playing)] == [0.25] * 3
    assert gate.times == [1]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise RuntimeError('no license')", "RuntimeError: no license"),
        ("1 / 0", r"ZeroDivisionError: .* \(.*raising_agent\.py:1\)"),
    ],
)
async def test_a_module_that_raises_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, episode: Episode, line: str, text: str
) -> None:
    """It fails the run by name, and ends no worker."""
    (tmp_path / "raising_agent.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "raising_agent", raising=False)
    with pytest.raises(ConfigurationError, match=text):
        await run_agent(AgentSpec(function="raising_agent:run"), episode)


async def test_a_module_that_wants_the_main_thread_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, episode: Episode
) -> None:
    lines = ["import signal", "signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))"]
    (tmp_path / "wants_main_thread.py").write_text("\n".join([*lines, "run = lambda episode: 0.5"]))
    monkeypatch.syspath_prepend(tmp_path)
    assert (await run_agent(AgentSpec(function="wants_main_thread:run"), episode)).reward == 0.5


async def test_an_agent_that_could_not_be_imported_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, episode: Episode
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    spec = AgentSpec(function="comes_later:run")
    with pytest.raises(ConfigurationError, match="comes_later"):
        await run_agent(spec, episode)
    (tmp_path / "comes_later.py").write_text("run = lambda episode: 0.5")
    importlib.invalidate_caches()
    assert (await run_agent(spec, episode)).reward == 0.5


@pytest.mark.parametrize("path", ["no_such_package:run", "tests.unit.test_agents:nothing"])
def test_an_agent_that_cannot_be_imported_is_a_configuration_error(path: str) -> None:
    with pytest.raises(ConfigurationError, match=path):
        load_agent_function(path)


@pytest.mark.parametrize(
    "value",
    [
        "0.5",
        float("nan"),
        float("inf"),
        [1.0],
        {"score": 1.0},
        b"1",
        {"reward": None},
        np.array([0.5, 1.0]),
        np.array(["0.5"]),
        10**400,
    ],
)
def test_results_that_are_no_reward(value: Any) -> None:
    with pytest.raises(AgentError):
        check_result(value, "reward")


@pytest.mark.parametrize(("value", "reward"), [(1, 1.0), (np.float32(0.5), 0.5), (True, 1.0), (None, None)])
def test_results_that_are(value: Any, reward: float | None) -> None:
    assert check_result(value, "reward").reward == reward


def command(script: str) -> AgentSpec:
    return AgentSpec(command=[sys.executable, "-c", script])


async def test_command_agent_reads_its_environment(episode: Episode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERROLL_ADMIN_KEY", "very-secret")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the operator's own")
    script = (
        "import json, os; p = json.loads(os.environ['EVERROLL_PROMPT']); print('noise');"
        "assert 'EVERROLL_ADMIN_KEY' not in os.environ;"
        "assert os.environ['OPENAI_API_KEY'] == os.environ['ANTHROPIC_API_KEY'] == 'secret-key';"
        "assert os.environ['ANTHROPIC_BASE_URL'] + '/v1' == os.environ['OPENAI_BASE_URL'];"
        "assert 'ANTHROPIC_AUTH_TOKEN' not in os.environ;"
        "print(json.dumps({'reward': p['label'], 'turns': 2}))"
    )
    result = await run_agent(command(script), episode)
    assert result.reward == 5.0
    assert result.metrics == {"turns": 2.0}


async def test_command_that_fails_shows_its_error_output(episode: Episode) -> None:
    with pytest.raises(AgentError, match=r"exited with 3: .*broken tool"):
        await run_agent(command("import sys; print('broken tool', file=sys.stderr); sys.exit(3)"), episode)


async def test_command_without_output_gives_no_verdict(episode: Episode) -> None:
    assert (await run_agent(command("pass"), episode)).reward is None


async def test_missing_command_is_a_configuration_error(episode: Episode) -> None:
    with pytest.raises(ConfigurationError, match="no-such-program"):
        await run_agent(AgentSpec(command=["no-such-program"]), episode)


async def test_cancelling_ends_the_command_and_its_children(episode: Episode, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        "import json, os, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
        f"open({str(pids)!r} + '.tmp', 'w').write(json.dumps([os.getpid(), child.pid]));"
        f"os.rename({str(pids)!r} + '.tmp', {str(pids)!r}); time.sleep(100)"
    )
    task = asyncio.create_task(run_agent(command(script), episode))
    deadline = time.monotonic() + 60
    while not pids.exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pid in json.loads(pids.read_text()):
        while is_running(pid):
            assert time.monotonic() < deadline, f"{pid} still runs"
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_keys_do_not_show_in_representations(episode: Episode) -> None:
    assert "secret-key" not in repr(episode)


async def test_an_openai_client_that_wants_another_transport_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(openai.AsyncOpenAI):
        def __init__(self, **options: Any) -> None:
            if "http_client" in options:
                raise TypeError("Invalid `http_client` argument")
            super().__init__(**options)

    assert type(await find_transport()) is FaithfulTransport
    monkeypatch.setattr(openai, "AsyncOpenAI", Strict)
    assert type(await find_transport()) is not FaithfulTransport


async def find_transport() -> object:
    """What an OpenAI client of a worker's event loop sends with."""
    async with httpx.AsyncClient() as http:
        clients = AgentClients(http)
        try:
            return clients.get_openai()._client._transport
        finally:
            await clients.close()


async def ask_openai(episode: Episode) -> None:
    client = episode.openai()
    await client.chat.completions.create(model="policy", messages=[])
    if threading.current_thread() is not threading.main_thread():
        await client.close()  # it is this thread's own


async def ask_without_client(episode: Episode) -> None:
    await episode.chat([])


@pytest.mark.parametrize("ask", [ask_openai, ask_without_client])
async def test_an_agent_with_an_event_loop_of_its_own_breaks_no_other(
    ask: Callable[[Episode], Coroutine[Any, Any, None]],
) -> None:
    """The first to ask runs its own loop on a thread, as harnesses with a blocking call do; others use the worker's."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with httpx.AsyncClient() as http:
        episode = build_episode(AgentClients(http), f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        for _ in range(2):
            await asyncio.to_thread(asyncio.run, ask(episode))
            await ask(episode)
        await episode.clients.close()
    await runner.cleanup()
