"""`python -m worker ROLE`, from the repository root or the image: one worker process.

ROLE is `workflows`, `rollout` or `trainer`. Settings come from the environment (`worker.settings`). The line
`worker ready` on standard error says that it polls.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from everroll.client import EverrollClient
from everroll.logs import configure_logging
from everroll.temporal import install_runtime
from worker.build import build_worker
from worker.settings import Role, WorkerSettings, load_settings

logger = logging.getLogger("worker")
_CONNECT_SECONDS = 60.0
_TOP_LEVEL = ("workflows", "activities", "worker", "trainer")


def check_root() -> None:
    """Stop unless the top-level packages come from this root: another distribution may install the same names."""
    root = Path(__file__).resolve().parent.parent
    for name in _TOP_LEVEL:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if found != root:
            raise SystemExit(
                f"worker: the package `{name}` would be imported from {found}, not from {root}. Another distribution "
                f"installs a package of that name; start the worker from {root}, or uninstall that distribution."
            )


async def serve(role: Role, settings: WorkerSettings) -> None:
    """Poll until SIGTERM or SIGINT, then let activities finish for a while."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = await EverrollClient.connect(settings.temporal_address, settings.temporal_namespace, _CONNECT_SECONDS)
    if role is Role.WORKFLOWS:
        # A search attribute that is not registered would keep workflow tasks failing for ever.
        await client.register_search_attributes()
    async with build_worker(role, client.temporal, settings) as worker, worker:
        logger.info("worker ready: %s on %s", role.value, worker.task_queue)
        await stop.wait()
        logger.info("worker stopping")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m worker", description="Run one Everroll worker.")
    parser.add_argument("role", type=Role, choices=list(Role), help="workflows, rollout or trainer")
    arguments = parser.parse_args()
    configure_logging(f"worker-{arguments.role.value}")
    check_root()
    try:
        settings = load_settings()
    except ValidationError as error:
        print(f"worker: the environment is not valid: {error}", file=sys.stderr)
        return 2
    install_runtime(settings.metrics_address)
    try:
        asyncio.run(serve(arguments.role, settings))
    except ConnectionError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    # Returning right after a worker has stopped now and then aborts the interpreter in the SDK's core.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
