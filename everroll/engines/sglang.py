"""Client of an SGLang engine, real or embedded: token ids in, token ids and log-probabilities out.

Strict where training depends on it: an answer whose counts, ids or log-probabilities do not agree raises
`EngineAnswerError`, and an abort that arrives with HTTP 200 raises `EngineUnavailableError`. All other fields are
ignored, so that other versions of the server keep working.
"""

from __future__ import annotations

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
    Trouble,
    WeightUpdateError,
)
from everroll.engines.http import EngineHttp, EngineTimeouts, JsonObject


class SGLangEngine:
    """Client of one SGLang server. The caller owns the session and closes it."""

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
        self._info_path = "/model_info"

    @property
    def base_url(self) -> str:
        return self._http.base_url

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; see `Engine.generate`. Cancelling it makes the engine drop the request."""
        payload = await self._http.call(
            "POST", "/generate", build_generate_body(request), self._timeouts.generate_seconds
        )
        answer = self._http.parse_object("POST", "/generate", payload)
        return _Reader("POST", self._http.url("/generate"), payload).read_completion(request, answer)

    async def weight_version(self) -> int:
        return (await self.serving()).version

    async def serving(self) -> Serving:
        info = await self._model_info()
        reader = AnswerReader("GET", self._http.url(self._info_path), b"")
        path = info.get("model_path")
        return Serving(reader.read_version(info.get("weight_version")), path if isinstance(path, str) else None)

    async def is_paused(self) -> bool | None:
        """The embedded engine tells; SGLang does not."""
        paused = (await self._model_info()).get("is_paused")
        return paused if isinstance(paused, bool) else None

    async def pause(self, mode: PauseMode) -> None:
        await self._http.call("POST", "/pause_generation", {"mode": mode}, self._timeouts.control_seconds)

    async def resume(self) -> None:
        await self._http.call("POST", "/continue_generation", {}, self._timeouts.control_seconds)

    async def abort_request(self, rid: str) -> None:
        """Make the engine drop the calls with this id; unknown ids are no error."""
        await self._http.call("POST", "/abort_request", {"rid": rid}, self._timeouts.control_seconds)

    async def update_weights(self, path: str, version: int) -> None:
        route = "/update_weights_from_disk"
        body: JsonObject = {
            "model_path": path,
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        status, payload = await self._http.send("POST", route, body, self._timeouts.update_seconds)
        if status not in (200, 400):
            self._http.raise_for_status("POST", route, status, payload)
        answer = self._http.parse_object("POST", route, payload)
        if status != 200 or answer.get("success") is not True:
            problem = f"weights {path} (version {version}) were refused: {answer.get('message', 'no reason given')}"
            raise WeightUpdateError(
                "POST", self._http.url(route), problem, status=status, body=payload.decode("utf-8", "replace")
            )

    async def check_health(self) -> None:
        await self._http.call("GET", "/health", None, self._timeouts.control_seconds)

    async def close(self) -> None:
        """Nothing to free: the session belongs to the caller."""

    async def _model_info(self) -> JsonObject:
        """`/model_info`, or `/get_model_info` on servers that do not know it yet."""
        try:
            payload = await self._http.call("GET", self._info_path, None, self._timeouts.control_seconds)
        except EngineRejectedError as error:
            if error.status != 404 or self._info_path == "/get_model_info":
                raise
            self._info_path = "/get_model_info"
            payload = await self._http.call("GET", self._info_path, None, self._timeouts.control_seconds)
        return self._http.parse_object("GET", self._info_path, payload)


def build_generate_body(request: GenerateRequest) -> JsonObject:
    """The body of `POST /generate`.

    `logprob_start_len` is left out on purpose: setting it scores the whole prompt and defeats the prefix cache.
    """
    sampling: JsonObject = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    return {
        "rid": request.rid,
        "input_ids": request.token_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }


class _Reader(AnswerReader):
    def read_completion(self, request: GenerateRequest, answer: JsonObject) -> Completion:
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise self.error("no meta_info")
        if meta.get("id") != request.rid:
            raise self.error(f"id is {meta.get('id')!r}, expected {request.rid!r}")
        finish_reason = self._read_finish_reason(meta)
        token_ids = self.read_token_ids(answer.get("output_ids"), "output_ids")
        self.check_num_tokens(token_ids, request.max_new_tokens)
        self._check_count(meta, "completion_tokens", len(token_ids))
        self._check_count(meta, "prompt_tokens", len(request.token_ids))
        version = self.read_version(meta.get("weight_version"))
        return Completion(
            token_ids=token_ids,
            logprobs=self._read_logprobs(meta.get("output_token_logprobs"), token_ids),
            weight_versions=self._read_token_versions(meta, len(token_ids), version),
            finish_reason=finish_reason,
            weight_version=version,
            num_cached_tokens=meta["cached_tokens"] if is_count(meta.get("cached_tokens")) else 0,
        )

    def _read_finish_reason(self, meta: JsonObject) -> FinishReason:
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else None
        if kind == "abort" and isinstance(reason, dict):
            problem = f"the engine aborted the call: {reason.get('message', 'no reason given')}"
            trouble: Trouble = "failed" if reason.get("status_code") == 500 else "busy"
            raise EngineUnavailableError("POST", self._url, problem, status=200, body=self.body, trouble=trouble)
        if kind == "stop":
            return "stop"
        if kind == "length":
            return "length"
        raise self.error(f"finish_reason is {reason!r}, expected stop, length or abort")

    def _read_logprobs(self, value: object, token_ids: list[int]) -> list[float]:
        if not isinstance(value, list) or len(value) != len(token_ids):
            got = len(value) if isinstance(value, list) else "no"
            raise self.error(f"{got} log-probabilities for {len(token_ids)} tokens")
        for index, row in enumerate(value):
            if not isinstance(row, list) or len(row) < 2:
                raise self.error(f"output_token_logprobs[{index}] is {row!r}, expected [logprob, token id, text]")
        if [row[1] for row in value] != token_ids:
            index = next(index for index, row in enumerate(value) if row[1] != token_ids[index])
            got = value[index][1]
            raise self.error(f"output_token_logprobs[{index}] is of token {got!r}, output_ids has {token_ids[index]}")
        return self.read_logprobs([row[0] for row in value], "output_token_logprobs")

    def _read_token_versions(self, meta: JsonObject, num_tokens: int, version: int) -> list[int]:
        """The embedded engine reports the version of every token; elsewhere the call's version stands for all."""
        value = meta.get("token_weight_versions")
        if value is None:
            return [version] * num_tokens
        if not isinstance(value, list) or len(value) != num_tokens or not all(is_count(item) for item in value):
            raise self.error(f"token_weight_versions does not hold {num_tokens} versions")
        return value

    def _check_count(self, meta: JsonObject, name: str, expected: int) -> None:
        if meta.get(name) != expected:
            raise self.error(f"{name} is {meta.get(name)!r}, expected {expected}")
