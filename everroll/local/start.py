"""Start the whole local stack in a directory, and hold it for as long as a block lasts."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from everroll.local.plan import StackOptions, choose_addresses, last_ports, plan_processes
from everroll.local.ports import PortReservations
from everroll.local.stack import LocalStack, run_stack
from everroll.local.state import StackDirectory
from everroll.local.supervisor import Report


@asynccontextmanager
async def hold_stack(directory: StackDirectory, options: StackOptions, report: Report) -> AsyncIterator[LocalStack]:
    """The stack, up and healthy inside the block.

    Raises:
        StackError: one runs here already, or a process does not come up.
    """
    directory.create()
    with directory.lock(), PortReservations() as ports:
        last = directory.read_last_addresses()
        if last is not None:
            options = dataclasses.replace(options, ports=last_ports(last, options.ports))
        addresses = choose_addresses(options, ports.choose, report)
        admin_key = secrets.token_urlsafe(32)
        specs = plan_processes(options, addresses, admin_key)
        async with run_stack(LocalStack(directory, addresses, admin_key, specs, report)) as stack:
            yield stack
