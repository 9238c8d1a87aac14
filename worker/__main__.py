"""`python -m worker ROLE`, from the repository root or the image: one worker process.

ROLE is `workflows`, `rollout` or `trainer`. Settings come from the environment (`worker.settings`). The line
`worker ready` on standard error says that it polls.

A trainer of several processes is started with torchrun: `torchrun --standalone --nproc-per-node 2 -m worker trainer`.
Rank 0 polls, and the others do as it says.
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
from typing import TYPE_CHECKING

from pydantic import ValidationError

from everroll.client import EverrollClient
from everroll.contracts.base import word_fault
from everroll.logs import configure_logging
from everroll.temporal import install_runtime
from worker.build import build_worker
from worker.settings import Role, WorkerSettings, load_settings
from worker.waiting import wait_for_servers

if TYPE_CHECKING:
    from trainer.distributed.ranks import Ranks

logger = logging.getLogger("worker")
_CONNECT_SECONDS = 60.0
_WAIT_GRACE_SECONDS = 30.0
"""The wait for servers ends by itself before; it may be in the middle of a question then."""
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


async def serve(role: Role, settings: WorkerSettings, ranks: Ranks | None = None) -> int:
    """Poll until SIGTERM or SIGINT, then let activities finish for a while. Returns the exit code.

    A trainer that has lost one of its processes ends with 1, so that whoever started them starts them again.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = await EverrollClient.connect(settings.temporal_address, settings.temporal_namespace, _CONNECT_SECONDS)
    if role is Role.WORKFLOWS:
        # A search attribute that is not registered would keep workflow tasks failing for ever.
        await client.register_search_attributes()
    if ranks is not None:
        ranks.when_lost(lambda: _set_from_thread(loop, stop))
    async with build_worker(role, client.temporal, settings, ranks) as worker:
        if await _wait_for_servers(settings, stop):
            async with worker:
                logger.info("worker ready: %s on %s", role.value, worker.task_queue)
                await stop.wait()
                logger.info("worker stopping")
    return 1 if ranks is not None and ranks.lost else 0


async def _wait_for_servers(settings: WorkerSettings, stop: asyncio.Event) -> bool:
    """False if the worker was told to stop meanwhile."""
    urls = [url.strip() for url in settings.wait_for.split(",") if url.strip()]
    waiting = asyncio.ensure_future(wait_for_servers(urls, settings.wait_seconds))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        limit = settings.wait_seconds + _WAIT_GRACE_SECONDS
        await asyncio.wait([waiting, stopping], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return False
        if not waiting.done():
            raise ConnectionError(f"waited {limit:g} s for {settings.wait_for} (EVERROLL_WAIT_FOR)")
        await waiting
        return True
    finally:
        for task in (waiting, stopping):
            task.cancel()
        await asyncio.gather(waiting, stopping, return_exceptions=True)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def join_ranks(settings: WorkerSettings) -> Ranks | int:
    """Rank 0 gets all ranks to work with; any other lives here, and gets its exit code."""
    import torch

    from trainer.distributed.ranks import Ranks, follow
    from trainer.distributed.world import join_world

    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    world = join_world(settings.collective_timeout_seconds)
    return Ranks(world) if world.rank == 0 else follow(world)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m worker", description="Run one Everroll worker.")
    parser.add_argument("role", type=Role, choices=list(Role), help="workflows, rollout or trainer")
    parser.add_argument("--build-id", help="version of this worker's workflow code (docs/upgrades.md)")
    parser.add_argument("--deployment-name", help="name under which workers have versions; everroll by default")
    arguments = parser.parse_args()
    configure_logging(f"worker-{arguments.role.value}")
    check_root()
    try:
        settings = load_settings(build_id=arguments.build_id, deployment_name=arguments.deployment_name)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            name = "_".join(map(str, item["loc"])).upper()
            print(f"worker: EVERROLL_{name}: {word_fault(item['msg'])}", file=sys.stderr)
        return 2
    ranks = None
    if arguments.role is Role.TRAINER and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        joined = join_ranks(settings)
        if isinstance(joined, int):
            return joined
        ranks = joined
    install_runtime(settings.metrics_address)
    try:
        return asyncio.run(serve(arguments.role, settings, ranks))
    except ConnectionError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main()
    # Returning right after a worker has stopped now and then aborts the interpreter in the SDK's core.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
