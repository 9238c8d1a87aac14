"""Client of a vLLM server: token ids in, token ids and log-probabilities out, by either of its two token-level doors.

`/inference/v1/generate` is used where the server offers it, `/v1/completions` with a prompt of token ids otherwise.
Weight versions need the server's development mode (`VLLM_SERVER_DEV_MODE=1`): `/weight_info` is asked before and after
each call, since answers carry no version. Tokens are then labelled with the older of the two, so that a call that
lived through an update can look staler than it is, never fresher.
"""

from __future__ import annotations

import asyncio
from typing import Literal, NoReturn

import aiohttp

from everroll.engines.answers import AnswerReader, is_count
from everroll.engines.base import (
    Completion,
    EngineRejectedError,
    EngineUnavailableError,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Serving,
    WeightUpdateError,
)
from everroll.engines.http import EngineHttp, EngineTimeouts, JsonObject

Door = Literal["generate", "completions"]

_PATHS: dict[Door, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}
_VERSION_PATH = "/weight_info"
_PAUSE_MODES: dict[PauseMode, str] = {"abort": "abort", "in_place": "keep"}
_NO_SUCH_ROUTE = (404, 405, 501)


class VllmEngine:
    """Client of one vLLM server. The caller owns the session and closes it.

    `door` fixes the route; None tries `generate` first and remembers what the server has.
    """

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        *,
        timeouts: EngineTimeouts | None = None,
        api_key: str | None = None,
        door: Door | None = None,
    ) -> None:
        self._timeouts = timeouts or EngineTimeouts()
        self._http = EngineHttp(base_url, session, self._timeouts.connect_seconds, api_key)
        self._door = door
        self._model = ""
        self._opening = asyncio.Lock()

    @property
    def base_url(self) -> str:
        return self._http.base_url

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; see `Engine.generate`. Cancelling it makes the engine drop the request."""
        before = await self.weight_version()
        door, model = await self._find_door()
        path = _PATHS[door]
        body = _BUILDERS[door](request, model, str(before))
        payload = await self._http.call("POST", path, body, self._timeouts.generate_seconds)
        answer = self._http.parse_object("POST", path, payload)
        after = await self.weight_version()
        versions = (min(before, after), after)
        return _Reader("POST", self._http.url(path), payload).read_completion(door, request, answer, versions)

    async def weight_version(self) -> int:
        try:
            info = await self._get(_VERSION_PATH)
        except EngineRejectedError as error:
            if error.status in _NO_SUCH_ROUTE:
                problem = "this server does not tell its weight version: it needs VLLM_SERVER_DEV_MODE=1 and vLLM 0.28"
                raise EngineRejectedError("GET", error.url, problem, status=error.status, body=error.body) from error
            raise
        return AnswerReader("GET", self._http.url(_VERSION_PATH), b"").read_version(info.get("weight_version"))

    async def serving(self) -> Serving:
        """vLLM keeps the name it was started with, whatever it loads; it does not tell the path."""
        return Serving(await self.weight_version(), None)

    async def is_paused(self) -> bool | None:
        paused = (await self._get("/is_paused")).get("is_paused")
        return paused if isinstance(paused, bool) else None

    async def pause(self, mode: PauseMode) -> None:
        """`in_place` is vLLM's `keep`; it has no way to send running calls back to the queue (`retract`)."""
        if mode not in _PAUSE_MODES:
            raise EngineRejectedError("POST", self._http.url("/pause"), f"vLLM knows no pause mode {mode}")
        path = f"/pause?mode={_PAUSE_MODES[mode]}&clear_cache=true"
        await self._http.call("POST", path, None, self._timeouts.control_seconds)

    async def resume(self) -> None:
        await self._http.call("POST", "/resume", None, self._timeouts.control_seconds)

    async def update_weights(self, path: str, version: int) -> None:
        """Every worker reloads from disk, the prefix cache is emptied, and only then the new version is announced."""
        body: JsonObject = {
            "method": "reload_weights",
            "kwargs": {"weights_path": path},
            "timeout": self._timeouts.update_seconds,
        }
        status, payload = await self._http.send("POST", "/collective_rpc", body, self._timeouts.update_seconds)
        if status in (400, 404, 405, 500):  # vLLM has no other way to say that a worker raised
            self._refuse("/collective_rpc", path, version, status, payload)
        self._http.raise_for_status("POST", "/collective_rpc", status, payload)
        await self._http.call("POST", "/reset_prefix_cache", None, self._timeouts.control_seconds)
        announcement: JsonObject = {"new_version": str(version)}
        route = "/update_weight_version"
        status, payload = await self._http.send("POST", route, announcement, self._timeouts.control_seconds)
        if status in (400, 404, 405):
            self._refuse(route, path, version, status, payload)
        self._http.raise_for_status("POST", route, status, payload)

    async def check_health(self) -> None:
        await self._http.call("GET", "/health", None, self._timeouts.control_seconds)

    async def close(self) -> None:
        """Nothing to free: the session belongs to the caller."""

    async def _find_door(self) -> tuple[Door, str]:
        """The route that this server offers, and the name of its model; asked once.

        A request that no server would accept tells whether the first route is there: 404 if not, 4xx or 5xx if so.
        """
        async with self._opening:
            if not self._model:
                self._model = await self._read_model()
            if self._door is None:
                path = _PATHS["generate"]
                status, payload = await self._http.send("POST", path, {}, self._timeouts.control_seconds)
                if status >= 500 and status not in _NO_SUCH_ROUTE:
                    self._http.raise_for_status("POST", path, status, payload)
                self._door = "completions" if status in _NO_SUCH_ROUTE else "generate"
            return self._door, self._model

    async def _read_model(self) -> str:
        info = await self._get("/v1/models")
        data = info.get("data")
        first = data[0] if isinstance(data, list) and data else None
        name = first.get("id") if isinstance(first, dict) else None
        if not isinstance(name, str) or not name:
            raise AnswerReader("GET", self._http.url("/v1/models"), b"").error(f"no model in {info!r:.200}")
        return name

    async def _get(self, path: str) -> JsonObject:
        payload = await self._http.call("GET", path, None, self._timeouts.control_seconds)
        return self._http.parse_object("GET", path, payload)

    def _refuse(self, route: str, path: str, version: int, status: int, payload: bytes) -> NoReturn:
        problem = f"weights {path} (version {version}) were refused"
        raise WeightUpdateError(
            "POST", self._http.url(route), problem, status=status, body=payload.decode("utf-8", "replace")
        )


def _build_sampling(request: GenerateRequest) -> JsonObject:
    sampling: JsonObject = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "logprobs": 0,
        "skip_special_tokens": False,
    }
    if request.seed is not None:
        sampling["seed"] = request.seed
    return sampling


def build_generate_body(request: GenerateRequest, model: str, salt: str) -> JsonObject:
    """The body of `POST /inference/v1/generate`; the salt keeps keys of older weights out of prefix-cache hits."""
    return {
        "request_id": request.rid,
        "model": model,
        "token_ids": request.token_ids,
        "sampling_params": _build_sampling(request),
        "stream": False,
        "cache_salt": salt,
    }


def build_completions_body(request: GenerateRequest, model: str, salt: str) -> JsonObject:
    """The body of `POST /v1/completions` with a prompt of token ids."""
    return {
        "request_id": request.rid,
        "model": model,
        "prompt": request.token_ids,
        **_build_sampling(request),
        "return_token_ids": True,
        "add_special_tokens": False,
        "stream": False,
        "cache_salt": salt,
    }


_BUILDERS = {"generate": build_generate_body, "completions": build_completions_body}


class _Reader(AnswerReader):
    def read_completion(
        self, door: Door, request: GenerateRequest, answer: JsonObject, versions: tuple[int, int]
    ) -> Completion:
        if door == "generate" and answer.get("request_id") not in (None, request.rid):
            raise self.error(f"request_id is {answer.get('request_id')!r}, expected {request.rid!r}")
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self.error("expected exactly one choice")
        choice = choices[0]
        finish_reason = self._read_finish_reason(choice)
        token_ids = self.read_token_ids(choice.get("token_ids"), "token_ids")
        self.check_num_tokens(token_ids, request.max_new_tokens)
        self._check_usage(answer.get("usage"), request, len(token_ids))
        values = self._read_content(choice) if door == "generate" else self._read_token_logprobs(choice)
        if values is None or len(values) != len(token_ids):
            got = "no" if values is None else len(values)
            raise self.error(f"{got} log-probabilities for {len(token_ids)} tokens")
        if door == "generate":
            values = [self._open_row(index, row, token_ids[index]) for index, row in enumerate(values)]
        return Completion(
            token_ids=token_ids,
            logprobs=self.read_logprobs(values, "logprobs"),
            weight_versions=[versions[0]] * len(token_ids),
            finish_reason=finish_reason,
            weight_version=versions[1],
            num_cached_tokens=_read_cached(answer.get("usage")),
        )

    def _read_finish_reason(self, choice: JsonObject) -> FinishReason:
        reason = choice.get("finish_reason")
        if reason in ("abort", "error"):
            problem = f"the engine aborted the call: finish_reason {reason}"
            trouble: Literal["busy", "failed"] = "busy" if reason == "abort" else "failed"
            raise EngineUnavailableError("POST", self._url, problem, status=200, body=self.body, trouble=trouble)
        if reason == "stop":
            return "stop"
        if reason == "length":
            return "length"
        raise self.error(f"finish_reason is {reason!r}, expected stop, length or abort")

    def _check_usage(self, usage: object, request: GenerateRequest, num_tokens: int) -> None:
        """Newer servers count; where they do, the counts must agree."""
        if not isinstance(usage, dict):
            return
        for name, expected in (("prompt_tokens", len(request.token_ids)), ("completion_tokens", num_tokens)):
            if usage.get(name) != expected:
                raise self.error(f"{name} is {usage.get(name)!r}, expected {expected}")

    def _read_content(self, choice: JsonObject) -> list[object] | None:
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        return content if isinstance(content, list) else None

    def _read_token_logprobs(self, choice: JsonObject) -> list[object] | None:
        logprobs = choice.get("logprobs")
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        return values if isinstance(values, list) else None

    def _open_row(self, index: int, row: object, token_id: int) -> object:
        if not isinstance(row, dict):
            raise self.error(f"logprobs.content[{index}] is {row!r}, expected token and logprob")
        if row.get("token") != f"token_id:{token_id}":
            raise self.error(f"logprobs.content[{index}] is of token {row.get('token')!r}, token_ids has {token_id}")
        return row.get("logprob")


def _read_cached(usage: object) -> int:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if is_count(cached) else 0  # type: ignore[return-value]
