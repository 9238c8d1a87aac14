"""Run a command's coroutine against a Temporal server, and word what can go wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from everroll.cli.errors import BAD_INPUT, FAILED, CommandError
from everroll.cli.options import Target
from everroll.client import EverrollClient, RunExistsError, RunFailedError, RunNotFoundError, SteeringError

_CONNECT_SECONDS = 5.0


def execute(target: Target, body: Callable[[EverrollClient], Awaitable[int]]) -> int:
    """Connect, run `body` and return its exit code.

    Raises:
        CommandError: no server, no such run, a run of that name exists, it cannot be steered so, or it failed.
    """
    # The SDK warns of each broken connection; the message below says it once.
    logging.getLogger("temporalio").setLevel(logging.ERROR)
    try:
        return asyncio.run(_connect_and_run(target, body))
    except (RunNotFoundError, RunExistsError, SteeringError) as error:
        raise CommandError(str(error), BAD_INPUT) from error
    except RunFailedError as error:
        raise CommandError(str(error), FAILED) from error
    except BrokenPipeError:
        return 0  # whoever read our output has seen enough
    except ConnectionError as error:
        raise CommandError(f"{error}\nIs the stack up? Start it with: everroll up FILE.toml", FAILED) from error


async def _connect_and_run(target: Target, body: Callable[[EverrollClient], Awaitable[int]]) -> int:
    return await body(await EverrollClient.connect(target.address, target.namespace, _CONNECT_SECONDS))
