"""The agent contract: a Python function, or a command, that plays one episode and returns its reward.

A function is `async def agent(episode: Episode) -> float | Mapping[str, float]` (a plain `def` runs on a thread). A
mapping holds the reward under the run's `reward_key`; its other numbers are reported as metrics. The agent talks to
`episode.base_url` with any OpenAI client, or to `episode.anthropic_base_url` with any Anthropic client; everything the
model says there is recorded by the session server.

A command finds the same in its environment (see `build_command_environment`) and prints its result, a number or a JSON
object, as the last line of its standard output.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import inspect
import json
import logging
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everroll.code_places import describe_error
from everroll.contracts.rollout import EpisodeKey
from everroll.contracts.spec import AgentSpec
from everroll.failures import ConfigurationError
from everroll.model_calls import MODEL_CALL_RETRIES, build_chat_body, complete_chat
from everroll.prompts import Prompt

if TYPE_CHECKING:
    import httpx
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

_LOGGER = logging.getLogger(__name__)
_OUTPUT_LIMIT_BYTES = 64 * 1024
_KILL_GRACE_SECONDS = 5.0
_CLIENT_TIMEOUT_SECONDS = 600.0
_CLIENT_CONNECTIONS = 1000


class AgentError(Exception):
    """The agent failed: its function raised, its command exited with an error, or its result is no reward."""


class AgentClients:
    """HTTP clients that all episodes of a worker process share."""

    def __init__(self, http: httpx.AsyncClient, max_threads: int = 128) -> None:
        self.http = http
        self.threads = ThreadPoolExecutor(max_threads, thread_name_prefix="agent")
        """For agents that are plain functions: each occupies a thread, so they get a pool of their own."""
        self._loop = _find_running_loop()
        """The worker's. What is shared is tied to it: an agent with a loop of its own gets clients of its own."""
        self._model_http: httpx.AsyncClient | None = None
        self._openai: AsyncOpenAI | None = None
        self._anthropic: AsyncAnthropic | None = None
        self._functions: dict[str, asyncio.Task[Callable[[Episode], Any]]] = {}

    async def find_function(self, path: str) -> Callable[[Episode], Any]:
        """The agent `package.module:name`, imported once, in a thread: with what it needs that can take many seconds,
        during which heartbeats go on.

        Raises:
            ConfigurationError: it cannot be imported or is not callable. The next episode tries again.
        """
        known = self._functions.get(path)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = self._functions[path] = asyncio.create_task(_import_agent(path))
        return await asyncio.shield(known)

    def get_openai(self) -> AsyncOpenAI:
        """Shared by all who run on the worker's event loop; anyone else gets one of their own."""
        if not self._is_shared():
            return _build_openai()
        if self._openai is None:
            try:
                self._openai = _build_openai(http_client=self._get_model_http())
            except TypeError as error:  # a version that wants another library's client; its own does as well
                _LOGGER.info("OpenAI's client uses its own connections: %s", error)
                self._openai = _build_openai()
        return self._openai

    def get_anthropic(self) -> AsyncAnthropic:
        """Shared by all who run on the worker's event loop; anyone else gets one of their own."""
        if not self._is_shared():
            return _build_anthropic()
        if self._anthropic is None:
            self._anthropic = _build_anthropic()
        return self._anthropic

    async def complete_chat(self, base_url: str, api_key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """See `everroll.model_calls.complete_chat`."""
        if self._is_shared():
            return await complete_chat(self._get_model_http(), base_url, api_key, body)
        async with _build_model_http() as http:
            return await complete_chat(http, base_url, api_key, body)

    def _is_shared(self) -> bool:
        return self._loop is not None and _find_running_loop() is self._loop

    def _get_model_http(self) -> httpx.AsyncClient:
        """Several times faster than the connections of OpenAI's client (docs/benchmarks.md)."""
        if self._model_http is None:
            self._model_http = _build_model_http()
        return self._model_http

    async def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for client in (self._openai, self._anthropic):
            if client is not None:
                await client.close()
        if self._model_http is not None:
            await self._model_http.aclose()


def _build_openai(**options: Any) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url="http://unset.invalid",
        api_key="unset",
        timeout=_CLIENT_TIMEOUT_SECONDS,
        max_retries=MODEL_CALL_RETRIES,
        **options,
    )


def _build_anthropic() -> AsyncAnthropic:
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(
        base_url="http://unset.invalid",
        api_key="unset",
        timeout=_CLIENT_TIMEOUT_SECONDS,
        max_retries=MODEL_CALL_RETRIES,
    )


def _build_model_http() -> httpx.AsyncClient:
    from everroll.http_client import build_http_client  # agents and their tests need not have it installed

    seconds = _CLIENT_TIMEOUT_SECONDS
    return build_http_client(read_seconds=seconds, pool_seconds=seconds, max_connections=_CLIENT_CONNECTIONS)


def _find_running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Episode:
    """What an agent gets: its prompt, and the session to talk to."""

    key: EpisodeKey
    prompt: Prompt
    base_url: str
    """OpenAI base URL of this episode's session, ending in `/v1`."""
    api_key: str = field(repr=False)
    """Opens this session and no other."""
    seed: int
    """Derives from run, group and member; for randomness of the environment."""
    args: dict[str, Any]
    """`rollout.agent.args` of the run file."""
    clients: AgentClients = field(repr=False)
    model: str = "policy"
    """Model name to send; the session server serves only one."""

    @property
    def anthropic_base_url(self) -> str:
        """The same session for Anthropic clients, which add `/v1/messages` themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def http(self) -> httpx.AsyncClient:
        """An HTTP client shared by all episodes of this process; do not close it."""
        return self.clients.http

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """One chat completion in this session, as the JSON object of the answer; `options` go into the request.

        Without a client library: a call costs the worker a fraction of the processor time.

        Raises:
            ModelCallError: the session server refused it, or failed at every try.
            httpx.TransportError: no answer came, at the last try either.
            ValueError: an option is a client's and no part of a request, or a stream was asked for.
        """
        body = build_chat_body(self.model, messages, options)
        return await self.clients.complete_chat(self.base_url, self.api_key, body)

    def openai(self) -> AsyncOpenAI:
        """An OpenAI client for this session, over connections shared by all episodes; do not close it."""
        return self.clients.get_openai().with_options(base_url=self.base_url, api_key=self.api_key)

    def anthropic(self) -> AsyncAnthropic:
        """An Anthropic client for this session, over connections shared by all episodes; do not close it."""
        return self.clients.get_anthropic().with_options(base_url=self.anthropic_base_url, api_key=self.api_key)


@dataclass(frozen=True)
class AgentResult:
    """A checked result."""

    reward: float | None
    """None when the agent returned nothing: there is no verdict, and no reward is invented."""
    metrics: dict[str, float]


def load_agent_function(path: str) -> Callable[[Episode], Any]:
    """Import `package.module:name`.

    Raises:
        ConfigurationError: it cannot be imported or is not callable.
    """
    module_name, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"agent function {path!r} cannot be imported by this worker: {error}. Is its package installed, or in the "
            f"directory that the worker was started from?"
        ) from error
    except (Exception, SystemExit) as error:
        reason = f"its module raised {describe_error(error)}"
        raise ConfigurationError(f"agent function {path!r} cannot be imported by this worker: {reason}") from error
    if not callable(target):
        raise ConfigurationError(f"agent function {path!r} is not callable")
    return target  # type: ignore[no-any-return]


async def _import_agent(path: str) -> Callable[[Episode], Any]:
    try:
        return await asyncio.to_thread(load_agent_function, path)
    except ConfigurationError as error:
        if not isinstance(error.__cause__, (ValueError, RuntimeError)):
            raise
    return load_agent_function(path)  # signal handlers and event loops can be set up in the main thread only


async def run_agent(spec: AgentSpec, episode: Episode) -> AgentResult:
    """Play one episode.

    Raises:
        AgentError: the agent failed; the cause is kept.
        ConfigurationError: there is no such agent.
    """
    if spec.function is not None:
        value = await _run_function(await episode.clients.find_function(spec.function), episode)
    else:
        value = await _run_command(spec.command or [], episode)
    return check_result(value, spec.reward_key)


async def _run_function(function: Callable[[Episode], Any], episode: Episode) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            return await function(episode)
        work = functools.partial(contextvars.copy_context().run, function, episode)
        value = await asyncio.get_running_loop().run_in_executor(episode.clients.threads, work)
        return await value if inspect.isawaitable(value) else value
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise AgentError("CancelledError: the agent cancelled itself") from error
    except (Exception, SystemExit) as error:
        raise AgentError(describe_error(error)) from error


def build_command_environment(episode: Episode) -> dict[str, str]:
    """Variables that a command finds, on top of the worker's own without its secrets."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("EVERROLL_") and name != "ANTHROPIC_AUTH_TOKEN"
    }
    return {
        **inherited,
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ANTHROPIC_BASE_URL": episode.anthropic_base_url,
        "ANTHROPIC_API_KEY": episode.api_key,
        "EVERROLL_MODEL": episode.model,
        "EVERROLL_SEED": str(episode.seed),
        "EVERROLL_PROMPT": json.dumps(
            {
                "index": episode.prompt.index,
                "messages": episode.prompt.messages,
                "label": episode.prompt.label,
                "metadata": episode.prompt.metadata,
            }
        ),
        "EVERROLL_ARGS": json.dumps(episode.args),
    }


async def _run_command(command: list[str], episode: Episode) -> Any:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=build_command_environment(episode),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigurationError(f"agent command {command[0]!r} cannot be started: {error}") from error
    try:
        stdout, stderr = await process.communicate()
    finally:
        await _end_process_group(process)
    if process.returncode != 0:
        text = stderr[-_OUTPUT_LIMIT_BYTES:].decode(errors="replace").strip()
        raise AgentError(f"{command[0]} exited with {process.returncode}: {text[-2000:]}")
    return _parse_command_output(stdout)


async def _end_process_group(process: asyncio.subprocess.Process) -> None:
    """End the command and whatever it left running, also when the episode is cancelled."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            return
        if process.returncode is not None:
            continue
        try:
            await asyncio.wait_for(process.wait(), _KILL_GRACE_SECONDS)
        except TimeoutError:
            continue


def _parse_command_output(stdout: bytes) -> Any:
    lines = stdout[-_OUTPUT_LIMIT_BYTES:].decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise AgentError(f"the last line of output is neither a number nor JSON: {lines[-1]!r:.200}") from error


def check_result(value: Any, reward_key: str) -> AgentResult:
    """Check what an agent returned.

    Raises:
        AgentError: the reward is not a finite number, or missing from the mapping.
    """
    if value is None:
        return AgentResult(reward=None, metrics={})
    if not isinstance(value, Mapping):
        return AgentResult(reward=_check_number(value, "reward"), metrics={})
    if reward_key not in value:
        raise AgentError(f"the agent's result has no key {reward_key!r}, only {sorted(map(str, value))}")
    metrics = {str(name): _check_number(number, str(name)) for name, number in value.items() if name != reward_key}
    return AgentResult(reward=_check_number(value[reward_key], reward_key), metrics=metrics)


def _check_number(value: Any, name: str) -> float:
    # numpy and torch scalars count as numbers; strings that look like one do not.
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise AgentError(f"{name} is {value!r:.200}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # an array of several, a huge integer
        raise AgentError(f"{name} is {value!r:.200}, not a number: {error}") from error
    if not math.isfinite(number):
        raise AgentError(f"{name} is {number}, not finite")
    return number
