"""A workflow whose module imports what no workflow may."""

import httpx
from temporalio import workflow

STARTED_AT = httpx.codes.OK.value


@workflow.defn
class ForbiddenWorkflow:
    @workflow.run
    async def run(self) -> int:
        return STARTED_AT
