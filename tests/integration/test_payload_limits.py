"""I9: nothing above 256 KiB reaches Temporal; who would send it fails by name, at once and for good."""

from __future__ import annotations

from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError, FailureError
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from everroll.client import EverrollClient
    from everroll.contracts.outcomes import ErrorType
    from everroll.temporal import MAX_PAYLOAD_BYTES

_LIMIT = timedelta(seconds=30)
_FITS = MAX_PAYLOAD_BYTES - 2
"""With its quotes."""


@activity.defn
async def answer(text: str) -> str:
    """As many letters as the text's first word says."""
    return "x" * int(text.split()[0])


@workflow.defn
class Sender:
    @workflow.run
    async def run(self, argument: int, returned: int, result: int) -> str:
        text = f"{returned} ".ljust(argument, "x")
        await workflow.execute_activity(answer, text, start_to_close_timeout=_LIMIT)
        return "x" * result


async def send(client: EverrollClient, queue: str, sizes: list[int]) -> str:
    async with Worker(client.temporal, task_queue=queue, workflows=[Sender], activities=[answer]):
        sent: str = await client.temporal.execute_workflow(
            Sender.run, args=sizes, id=queue, task_queue=queue, execution_timeout=_LIMIT
        )
    return sent


def find_root(error: BaseException) -> BaseException:
    while isinstance(error, (WorkflowFailureError, FailureError)) and error.cause is not None:
        error = error.cause
    return error


async def test_payloads_at_the_limit_are_sent(client: EverrollClient, task_queue: str) -> None:
    assert len(await send(client, task_queue, [_FITS, _FITS, _FITS])) == _FITS


@pytest.mark.parametrize("where", [0, 1, 2], ids=["argument", "result of an activity", "result of a workflow"])
async def test_larger_payloads_are_refused(client: EverrollClient, task_queue: str, where: int) -> None:
    sizes = [_FITS + 1 if number == where else 1 for number in range(3)]
    with pytest.raises(WorkflowFailureError) as raised:
        await send(client, task_queue, sizes)
    root = find_root(raised.value)
    assert isinstance(root, ApplicationError)
    assert root.type == ErrorType.PAYLOAD_TOO_LARGE.value
    assert f"{MAX_PAYLOAD_BYTES + 1} bytes" in str(root)
    history = await client.temporal.get_workflow_handle(task_queue).fetch_history()
    assert not any(event.HasField("workflow_task_failed_event_attributes") for event in history.events)
