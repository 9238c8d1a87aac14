"""What the supervisor asks the processes that it has started.

Not imported before the first question: the clients of HTTP and of Temporal take half a second to import, and by then
the processes should be loading.
"""

from __future__ import annotations

from datetime import timedelta

import httpx
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

_TIMEOUT_SECONDS = 3.0
_RPC_TIMEOUT = timedelta(seconds=_TIMEOUT_SECONDS)
QUEUE_TYPES = {
    "workflow": TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
    "activity": TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
}


async def is_answered(url: str) -> bool:
    """Whether GET `url` answers 200."""
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
            return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False


class TemporalQuestions:
    """Over one connection: one of its own for each question would cost more than the answer."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    async def open(cls, address: str, namespace: str) -> TemporalQuestions:
        """It connects with the first question, and again when the server was away."""
        return cls(await Client.connect(address, namespace=namespace, lazy=True))

    async def is_namespace_known(self) -> bool:
        request = DescribeNamespaceRequest(namespace=self._client.namespace)
        try:
            await self._client.workflow_service.describe_namespace(request, timeout=_RPC_TIMEOUT)
        except (RuntimeError, RPCError):
            return False
        return True

    async def list_pollers(self, task_queue: str, kind: str) -> list[str]:
        """Identities of the workers that poll the task queue, or did within the last minutes; `kind` as in
        `QUEUE_TYPES`."""
        request = DescribeTaskQueueRequest(
            namespace=self._client.namespace,
            task_queue=TaskQueue(name=task_queue),
            task_queue_type=QUEUE_TYPES[kind],
        )
        try:
            answer = await self._client.workflow_service.describe_task_queue(request, timeout=_RPC_TIMEOUT)
        except (RuntimeError, RPCError):
            return []
        return [poller.identity for poller in answer.pollers]
