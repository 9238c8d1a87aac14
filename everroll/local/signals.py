"""End work in good order when the process is told to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedBySignalError(Exception):
    """The work was cancelled because of a signal; it has cleaned up."""


async def run_interruptibly(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; the first SIGINT, SIGTERM or SIGHUP cancels it, later ones leave its clean-up alone.

    Raises:
        InterruptedBySignalError: after the work has ended because of a signal.
    """
    task = asyncio.ensure_future(work)
    received: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        if not received:
            task.cancel()
        received.append(number)

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise InterruptedBySignalError(received[0].name) from None
        raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
