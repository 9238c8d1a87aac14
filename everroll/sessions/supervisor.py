"""Several session server processes behind one address on one machine: started, and started again when they die.

All of them accept connections from one socket, which the supervisor keeps open: a connection that meets a moment
without a process waits in its queue. A process ends when its supervisor does, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time

from everroll.sessions.journal import is_postgres, open_journal
from everroll.sessions.settings import SessionServerSettings

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_STEADY_SECONDS = 30.0
"""A process that has lived so long was well; the next one is started at once."""
_STOP_SECONDS = 10.0
"""Beyond the grace for calls in flight."""

_log = logging.getLogger(__name__)


def supervise(settings: SessionServerSettings, listener: socket.socket) -> None:
    """Keep `settings.processes` processes serving at `listener` until SIGTERM or SIGINT.

    Raises:
        JournalError: the journal cannot be opened.
    """
    asyncio.run(_supervise(settings, listener))


async def _supervise(settings: SessionServerSettings, listener: socket.socket) -> None:
    await _prepare_journal(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    host, port = listener.getsockname()[:2]
    _log.info("%d session server processes on http://%s:%d", settings.processes, host, port)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_keep_running(settings, listener.fileno())) for _ in range(settings.processes)]
        await stop.wait()
        for task in tasks:
            task.cancel()


async def _prepare_journal(settings: SessionServerSettings) -> None:
    """Make the tables once, before many try; what earlier processes held is free."""
    journal = await open_journal(settings.journal, settings.journal_synchronous)
    try:
        if not is_postgres(settings.journal):
            await journal.end_all_leases()
    finally:
        await journal.close()


async def _keep_running(settings: SessionServerSettings, listener_fd: int) -> None:
    """Run one process, and the next one when it has ended."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        code = await _run_process(settings, listener_fd)
        if time.monotonic() - started > _STEADY_SECONDS:
            pause = _FIRST_PAUSE_SECONDS
        _log.error("a session server process ended with code %d; the next one starts in %.1f s", code, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


async def _run_process(settings: SessionServerSettings, listener_fd: int) -> int:
    """Run one process to its end; ends it in order when cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "everroll.sessions.member", str(listener_fd)),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=(listener_fd,),
    )
    assert process.stdin is not None
    try:
        with contextlib.suppress(ConnectionError):  # it has ended already; its code says so
            process.stdin.write(settings.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        return await process.wait()
    except asyncio.CancelledError:
        await _stop(process, settings.shutdown_grace_seconds + _STOP_SECONDS)
        raise


async def _stop(process: asyncio.subprocess.Process, timeout_seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(timeout_seconds):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
