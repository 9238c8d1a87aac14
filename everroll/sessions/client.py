"""Client of the session server, for activities and tools.

Raises httpx's exceptions untouched, `ServerStatusError` for any non-2xx answer, and `BadAnswerError` (or its subclass
`MalformedSamplesError`) for a 2xx answer that breaks the protocol; `everroll.failures` says what each means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from everroll.contracts.names import ENGINE_TROUBLE_HEADER
from everroll.contracts.outcomes import BadAnswerError, Cause, CauseKind
from everroll.contracts.spec import SamplingSpec
from everroll.failures import parse_json, raise_for_status
from everroll.tokens.samples import MalformedSamplesError, SampleSet, decode_samples


@dataclass(frozen=True)
class SessionHandle:
    """What an agent needs to talk to its session."""

    session_id: str
    base_url: str
    """For any OpenAI client: `<server>/sessions/<id>/v1`."""
    api_key: str = field(repr=False)
    """Opens this session and nothing else."""
    num_turns: int
    """Turns recorded so far; more than 0 when an episode is taken up again."""


@dataclass(frozen=True)
class CollectedSamples:
    """Samples as they came, and decoded."""

    body: bytes = field(repr=False)
    sample_set: SampleSet
    engine_trouble: Cause | None = None
    """Set when the session's latest model call failed in the engines."""


@dataclass(frozen=True)
class EmptySamples:
    """The session gave nothing to train."""

    cause_kind: CauseKind
    text: str
    engine_trouble: Cause | None = None


@dataclass(frozen=True)
class Swept:
    """What a sweep did, in sessions."""

    num_released: int
    num_deleted: int


class SessionClient:
    """Calls to one session server. The caller owns the HTTP client, and its timeouts."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, admin_key: str) -> None:
        self._http = http
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}

    async def create(
        self,
        session_id: str,
        sampling: SamplingSpec,
        seed: int,
        attempt: int | None = None,
        min_weight_version: int | None = None,
        run: str | None = None,
        series: str | None = None,
    ) -> SessionHandle:
        """Create the session, or open it again; `attempt` grows with each attempt at the episode.

        With a `series` it need only grow within that, and a new series takes over from those before.

        No turn is sampled by weights older than `min_weight_version`. `run` is the run it belongs to, where its id does
        not say so as `<run>-<group>-<member>-<attempt>` does.
        """
        body = {
            "session_id": session_id,
            "sampling": sampling.model_dump(mode="json"),
            "seed": seed,
            "attempt": attempt,
            "min_weight_version": min_weight_version,
            "run": run,
            "series": series,
        }
        answer = parse_json(await self._call("POST", "/sessions", body))
        api_key, num_turns = answer.get("api_key"), answer.get("num_turns")
        if answer.get("session_id") != session_id or not isinstance(api_key, str) or not isinstance(num_turns, int):
            raise BadAnswerError(f"POST {self.base_url}/sessions answered for {answer.get('session_id')!r:.200}")
        return SessionHandle(session_id, f"{self.base_url}{_path(session_id)}/v1", api_key, num_turns)

    async def collect(
        self, session_id: str, max_seq_len: int | None, metadata: dict[str, Any], *, seal: bool = False
    ) -> CollectedSamples | EmptySamples:
        """The session's samples, checked. With `seal`, the attempt that made them takes no further turns."""
        body = {"max_seq_len": max_seq_len, "metadata": metadata}
        query = "?seal=true" if seal else ""  # not in the body: servers of earlier versions refuse what they don't know
        response = await self._call("POST", f"{_path(session_id)}/samples{query}", body)
        if response.headers.get("content-type", "").startswith("application/json"):
            return _parse_empty(response)
        samples = decode_samples(response.content)
        if samples.session_id != session_id:
            raise MalformedSamplesError(f"asked for session {session_id}, got samples of {samples.session_id!r:.200}")
        return CollectedSamples(response.content, samples, _parse_trouble(response))

    async def release(self, session_id: str) -> None:
        """Release the session; released and unknown ones are no error."""
        await self._call("DELETE", _path(session_id))

    async def describe(self, session_id: str) -> dict[str, object]:
        """The session's records, for people."""
        return parse_json(await self._call("GET", _path(session_id)))

    async def end_run(self, run: str) -> None:
        """Say that a run has ended: what it left unreleased is released, and its retention begins. Harmless to repeat;
        a session of the run that is opened again takes it back."""
        await self._call("POST", f"/runs/{quote(run, safe='')}/ended")

    async def sweep(self, idle_seconds: float | None = None) -> Swept:
        """Release what nobody uses any more, and delete what has expired.

        Args:
            idle_seconds: how long a session must have gone unused; default: the server's limit.
        """
        released: set[str] = set()
        deleted = 0
        while True:
            answer = parse_json(await self._call("POST", "/sweep", {"idle_seconds": idle_seconds}))
            unused, count = answer.get("unused"), answer.get("deleted")
            if not isinstance(unused, list) or not isinstance(count, int):
                raise BadAnswerError(f"POST {self.base_url}/sweep answered {answer!r:.200}")
            deleted += count
            remaining = [session_id for session_id in unused if session_id not in released]
            if not remaining:
                return Swept(len(released), deleted)
            for session_id in remaining:
                await self.release(session_id)
                released.add(session_id)

    async def info(self) -> dict[str, object]:
        """What the server serves: model_path, renderer, chat_template, tokenizer_fingerprint, engine_urls, ..."""
        return parse_json(await self._call("GET", "/info"))

    async def engines(self) -> list[dict[str, object]]:
        """Every engine behind the server: url, healthy, weight_version, last_error and counts."""
        answer = parse_json(await self._call("GET", "/engines"))
        engines = answer.get("engines")
        if not isinstance(engines, list):
            raise BadAnswerError(f"GET {self.base_url}/engines answered {answer!r:.200}")
        return engines

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        response = await self._http.request(method, f"{self.base_url}{path}", json=body, headers=self._headers)
        raise_for_status(response)
        return response


def _path(session_id: str) -> str:
    return f"/sessions/{quote(session_id, safe='')}"


def _parse_empty(response: httpx.Response) -> EmptySamples:
    answer = parse_json(response)
    kinds = (CauseKind.NO_RECORDS, CauseKind.ALL_TRUNCATED)
    kind = next((kind for kind in kinds if kind.value == answer.get("cause")), None)
    if answer.get("num_samples") != 0 or kind is None:
        raise BadAnswerError(f"{response.request.method} {response.request.url} answered {answer!r:.200}")
    return EmptySamples(kind, str(answer.get("message", "")), _parse_trouble(response))


def _parse_trouble(response: httpx.Response) -> Cause | None:
    text = response.headers.get(ENGINE_TROUBLE_HEADER)
    if text is None:
        return None
    try:
        return Cause.model_validate_json(text)
    except ValueError as error:
        raise BadAnswerError(f"header {ENGINE_TROUBLE_HEADER} holds no cause: {text!r:.200}") from error
