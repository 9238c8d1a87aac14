"""How the supervisor tells that a process serves: by asking it as a client would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from everroll.local.listening import listens_on

if TYPE_CHECKING:
    from everroll.local.questions import TemporalQuestions


@dataclass(frozen=True)
class HttpReady:
    """Ready when GET `url` answers 200, and it is the process that answers."""

    url: str

    async def is_ready(self, pid: int) -> bool:
        if not listens_on(pid, urlsplit(self.url).port or 80):
            return False
        from everroll.local.questions import is_answered

        return await is_answered(self.url)


@dataclass
class TemporalConnection:
    """Where Temporal is, and what it was asked over before."""

    address: str
    namespace: str
    _questions: TemporalQuestions | None = field(default=None, init=False, repr=False)

    async def open(self) -> TemporalQuestions:
        from everroll.local.questions import TemporalQuestions

        if self._questions is None:
            self._questions = await TemporalQuestions.open(self.address, self.namespace)
        return self._questions


@dataclass(frozen=True)
class TemporalReady:
    """Ready when the Temporal server, and it is this process, knows its namespace."""

    connection: TemporalConnection

    async def is_ready(self, pid: int) -> bool:
        if not listens_on(pid, int(self.connection.address.rpartition(":")[2])):
            return False
        return await (await self.connection.open()).is_namespace_known()


@dataclass(frozen=True)
class WorkerReady:
    """Ready when the server has seen this very process poll the task queue."""

    connection: TemporalConnection
    task_queue: str
    kind: Literal["workflow", "activity"]

    async def is_ready(self, pid: int) -> bool:
        pollers = await (await self.connection.open()).list_pollers(self.task_queue, self.kind)
        # The SDK's identity of a worker is `<pid>@<host>`; pollers of earlier processes stay listed for minutes.
        return any(identity.partition("@")[0] == str(pid) for identity in pollers)
