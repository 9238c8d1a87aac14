"""How the supervisor tells that a process serves: by asking it as a client would."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

import httpx
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from everroll.local.listening import listens_on

_TIMEOUT_SECONDS = 3.0
_RPC_TIMEOUT = timedelta(seconds=_TIMEOUT_SECONDS)
_QUEUE_TYPES = {
    "workflow": TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    "activity": TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
}


@dataclass(frozen=True)
class HttpReady:
    """Ready when GET `url` answers 200, and it is the process that answers."""

    url: str

    async def is_ready(self, pid: int) -> bool:
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
                healthy = (await client.get(self.url)).status_code == 200
        except httpx.TransportError:
            return False
        return healthy and listens_on(pid, urlsplit(self.url).port or 80)


@dataclass(frozen=True)
class TemporalReady:
    """Ready when the Temporal server, and it is this process, knows its namespace."""

    address: str
    namespace: str

    async def is_ready(self, pid: int) -> bool:
        try:
            client = await Client.connect(self.address, namespace=self.namespace)
            request = DescribeNamespaceRequest(namespace=self.namespace)
            await client.workflow_service.describe_namespace(request, timeout=_RPC_TIMEOUT)
        except (RuntimeError, RPCError):
            return False
        return listens_on(pid, int(self.address.rpartition(":")[2]))


@dataclass(frozen=True)
class WorkerReady:
    """Ready when the server has seen this very process poll the task queue."""

    address: str
    namespace: str
    task_queue: str
    kind: Literal["workflow", "activity"]

    async def is_ready(self, pid: int) -> bool:
        request = DescribeTaskQueueRequest(
            namespace=self.namespace,
            task_queue=TaskQueue(name=self.task_queue),
            task_queue_type=_QUEUE_TYPES[self.kind],
        )
        try:
            client = await Client.connect(self.address, namespace=self.namespace)
            answer = await client.workflow_service.describe_task_queue(request, timeout=_RPC_TIMEOUT)
        except (RuntimeError, RPCError):
            return False
        # The SDK's identity of a worker is `<pid>@<host>`; pollers of earlier processes stay listed for minutes.
        return any(poller.identity.partition("@")[0] == str(pid) for poller in answer.pollers)
