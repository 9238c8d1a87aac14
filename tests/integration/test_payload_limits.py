"""I9: nothing above 256 KiB reaches Temporal; who would send it fails by name, at once and for good."""

from __future__ import annotations

import random
import string
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError, FailureError
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from benchmarks.orchestration_history import find_payloads
    from everroll.client import EverrollClient
    from everroll.contracts.outcomes import ErrorType
    from everroll.payloads import COMPRESSED_FROM_BYTES, MAX_PAYLOAD_BYTES

_LIMIT = timedelta(seconds=30)
_TOO_LARGE = 2 * MAX_PAYLOAD_BYTES
_FITS = MAX_PAYLOAD_BYTES + 10_000
"""Letters compress to three quarters."""


def build_text(size: int) -> str:
    """Letters without a pattern."""
    return "".join(random.Random(size).choices(string.ascii_letters, k=size))


@activity.defn
async def answer(text: str) -> str:
    """As many letters as the text's first word says."""
    return build_text(int(text.split()[0]))


@workflow.defn
class Sender:
    @workflow.run
    async def run(self, argument: int, returned: int, result: int) -> str:
        text = f"{returned} {build_text(argument)}"
        answered = await workflow.execute_activity(answer, text, start_to_close_timeout=_LIMIT)
        assert answered == build_text(returned)
        return build_text(result)


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


async def test_large_payloads_are_compressed(client: EverrollClient, task_queue: str) -> None:
    assert await send(client, task_queue, [_FITS, _FITS, _FITS]) == build_text(_FITS)
    history = await client.temporal.get_workflow_handle(task_queue).fetch_history()
    sizes = [len(payload.data) for event in history.events for payload in find_payloads(event)]
    large = [size for size in sizes if size > COMPRESSED_FROM_BYTES]
    assert len(large) == 3
    assert max(large) < MAX_PAYLOAD_BYTES < _FITS


@pytest.mark.parametrize("where", [0, 1, 2], ids=["argument", "result of an activity", "result of a workflow"])
async def test_larger_payloads_are_refused(client: EverrollClient, task_queue: str, where: int) -> None:
    sizes = [_TOO_LARGE if number == where else 1 for number in range(3)]
    with pytest.raises(WorkflowFailureError) as raised:
        await send(client, task_queue, sizes)
    root = find_root(raised.value)
    assert isinstance(root, ApplicationError)
    assert root.type == ErrorType.PAYLOAD_TOO_LARGE.value
    assert f"the limit is {MAX_PAYLOAD_BYTES}" in str(root)
    history = await client.temporal.get_workflow_handle(task_queue).fetch_history()
    assert not any(event.HasField("workflow_task_failed_event_attributes") for event in history.events)
