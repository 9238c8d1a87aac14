"""Preflight: within seconds, a list of everything that would keep a run from working."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import aiohttp
import httpx

from everroll.contracts.spec import DataPaths, EngineKind, ModelSection, RunSpec
from everroll.engines.open import open_engine
from everroll.failures import ConfigurationError, Outcome, classify
from everroll.prompts import Dataset, load_dataset
from everroll.sessions.client import SessionClient
from everroll.store import open_store
from everroll.tokens.fingerprint import compute_tokenizer_fingerprint

_CHECK_SECONDS = 10.0
_AGAIN_SECONDS = 0.5


class Preflight:
    """Asks every service at once."""

    def __init__(self, http: httpx.AsyncClient, engine_session: aiohttp.ClientSession, admin_key: str) -> None:
        self._http = http
        self._engine_session = engine_session
        self._admin_key = admin_key

    async def check(self, spec: RunSpec, patience_seconds: float = 0.0) -> Dataset:
        """Returns the data set when all is well.

        `patience_seconds`: how long servers that are away are asked again. A run that starts says at once what is not
        there; one that goes on often does so while what was mended is still coming up.

        Raises:
            ConfigurationError: a line per fault, each naming what was asked.
        """
        services = spec.services
        checks: dict[str, Awaitable[object]] = {
            f"store {services.store_url}": asyncio.wait_for(
                asyncio.to_thread(_check_store, services.store_url), _CHECK_SECONDS
            )
        }
        if spec.run.mode != "train":
            sessions = partial(self._check_sessions, spec)
            checks[f"session server {services.session_url}"] = _ask_until(sessions, patience_seconds)
            for url in services.engine_urls:
                engine = partial(self._check_engine, services.engine_kind, url)
                checks[f"engine {url}"] = _ask_until(engine, patience_seconds)
        # Every row is read, perhaps downloaded: that takes its time, within the activity's deadline.
        checks["data"] = asyncio.to_thread(load_dataset, spec.data.path)
        for name, path in spec.eval.named_paths.items():
            checks[f"prompts of evaluation {name}"] = asyncio.to_thread(_check_prompts, path)
        results = await asyncio.gather(*checks.values(), return_exceptions=True)
        faults = [
            f"- {name}: {_describe(result)}"
            for name, result in zip(checks, results, strict=True)
            if isinstance(result, BaseException)
        ]
        if faults:
            raise ConfigurationError(f"run {spec.run.name} cannot start:\n" + "\n".join(faults))
        return next(result for result in results if isinstance(result, Dataset))

    async def _check_sessions(self, spec: RunSpec) -> None:
        info = await SessionClient(self._http, spec.services.session_url, self._admin_key).info()
        served = str(info.get("model_path"))
        if Path(served) != Path(spec.model.path):
            raise ConfigurationError(f"it serves the model {served}, the run trains {spec.model.path}")
        _check_renderer(info, spec.model)
        if info.get("history") != spec.model.history:
            raise ConfigurationError(
                f"its history policy is {info.get('history')}, the run's model.history is {spec.model.history}"
            )
        if info.get("history_match") != spec.model.history_match:
            raise ConfigurationError(
                f"it matches histories by {info.get('history_match')}, the run's model.history_match is "
                f"{spec.model.history_match}"
            )
        expected = await asyncio.to_thread(_read_fingerprint, Path(spec.model.path))
        if expected is not None and info.get("tokenizer_fingerprint") != expected:
            raise ConfigurationError(
                f"its tokenizer is not the one in {spec.model.path} now: the files changed since it started; restart it"
            )
        used = info.get("engine_urls")
        known = {str(url).rstrip("/") for url in used} if isinstance(used, list) else set()
        strangers = [url for url in spec.services.engine_urls if url.rstrip("/") not in known]
        if strangers:
            raise ConfigurationError(
                f"it does not use {', '.join(strangers)} but {', '.join(sorted(known)) or 'no engine'}: new weights "
                f"would go to engines that play no episode. Make services.engine_urls and its --engine-urls agree"
            )

    async def _check_engine(self, kind: EngineKind, url: str) -> None:
        await open_engine(kind, url, self._engine_session).weight_version()


async def _ask_until(check: Callable[[], Awaitable[None]], patience_seconds: float) -> None:
    """Ask again for so long as the server is away; what it answers, good or bad, holds."""
    give_up = time.monotonic() + patience_seconds
    while True:
        try:
            return await asyncio.wait_for(check(), _CHECK_SECONDS)
        except Exception as error:
            if classify(error).outcome is not Outcome.TRANSIENT or time.monotonic() >= give_up:
                raise
        await asyncio.sleep(_AGAIN_SECONDS)


def _check_renderer(info: dict[str, object], model: ModelSection) -> None:
    """A run file with `auto` takes the chat format that the server has told; its arguments must be equal always."""
    mend = "Start it anew with the run file's (`everroll up FILE` does), or correct the run file"
    if model.renderer not in ("auto", info.get("renderer")):
        raise ConfigurationError(
            f"it renders chats by {info.get('renderer')}, the run's model.renderer is {model.renderer}. {mend}"
        )
    arguments = info.get("chat_template", model.chat_template)  # servers of earlier versions do not tell
    if arguments != model.chat_template:
        raise ConfigurationError(
            f"its chat template has the arguments {json.dumps(arguments)}, the run's model.chat_template is "
            f"{json.dumps(model.chat_template)}. {mend}"
        )


def _read_fingerprint(model_dir: Path) -> str | None:
    """None where this worker does not see the model's directory."""
    return compute_tokenizer_fingerprint(model_dir) if model_dir.is_dir() else None


def _check_prompts(path: DataPaths) -> None:
    load_dataset(path).close()


def _check_store(url: str) -> None:
    open_store(url).check_writable()


def _describe(error: BaseException) -> str:
    if isinstance(error, ConfigurationError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no answer within {_CHECK_SECONDS:.0f} s"
    return f"{type(error).__name__}: {error}"
