"""A client that asks the server what it is, once, and then is the client for that kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from everroll.engines.base import (
    Completion,
    Engine,
    EngineAnswerError,
    EngineError,
    EngineRejectedError,
    GenerateRequest,
    PauseMode,
    Serving,
)
from everroll.engines.http import EngineHttp, EngineTimeouts
from everroll.engines.sglang import SGLangEngine
from everroll.engines.vllm import VllmEngine

# Which answer gives a server away: path, a field that its answer has, and the client.
_SIGNS: tuple[tuple[str, str, type[SGLangEngine] | type[VllmEngine]], ...] = (
    ("/model_info", "weight_version", SGLangEngine),
    ("/get_model_info", "model_path", SGLangEngine),
    ("/version", "version", VllmEngine),
)


class DetectedEngine:
    """Any supported engine. Until it has answered once, every call asks again what it is."""

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        *,
        timeouts: EngineTimeouts | None = None,
        api_key: str | None = None,
    ) -> None:
        self._timeouts = timeouts or EngineTimeouts()
        self._http = EngineHttp(base_url, session, self._timeouts.connect_seconds, api_key)
        self._open: Callable[[type[SGLangEngine] | type[VllmEngine]], Engine] = lambda kind: kind(
            base_url, session, timeouts=timeouts, api_key=api_key
        )
        self._engine: Engine | None = None
        self._asking = asyncio.Lock()

    @property
    def base_url(self) -> str:
        return self._http.base_url

    async def generate(self, request: GenerateRequest) -> Completion:
        return await (await self.detect()).generate(request)

    async def weight_version(self) -> int:
        return await (await self.detect()).weight_version()

    async def serving(self) -> Serving:
        return await (await self.detect()).serving()

    async def is_paused(self) -> bool | None:
        return await (await self.detect()).is_paused()

    async def pause(self, mode: PauseMode) -> None:
        await (await self.detect()).pause(mode)

    async def resume(self) -> None:
        await (await self.detect()).resume()

    async def update_weights(self, path: str, version: int) -> None:
        await (await self.detect()).update_weights(path, version)

    async def check_health(self) -> None:
        await (await self.detect()).check_health()

    async def close(self) -> None:
        """Nothing to free: the session belongs to the caller."""

    async def detect(self) -> Engine:
        """The client for what this server is.

        Raises:
            EngineUnavailableError: no answer.
            EngineRejectedError: it answers, and is neither SGLang nor vLLM.
        """
        async with self._asking:
            if self._engine is None:
                self._engine = self._open(await self._find_kind())
            return self._engine

    async def _find_kind(self) -> type[SGLangEngine] | type[VllmEngine]:
        said: list[str] = []
        for path, field, kind in _SIGNS:
            try:
                payload = await self._http.call("GET", path, None, self._timeouts.control_seconds)
                if field in self._http.parse_object("GET", path, payload):
                    return kind
                said.append(f"{path} has no {field}")
            except (EngineRejectedError, EngineAnswerError) as error:
                _raise_if_locked(error)
                said.append(f"{path}: {error.status or error.problem}")
        problem = f"neither SGLang nor vLLM ({'; '.join(said)}); name its kind if it is one behind a proxy"
        raise EngineRejectedError("GET", self.base_url, problem)


def _raise_if_locked(error: EngineError) -> None:
    """A missing key is no sign of another kind of server; and a URL that can never work is none either."""
    if error.status in (401, 403) or (error.status is None and isinstance(error, EngineRejectedError)):
        raise error
