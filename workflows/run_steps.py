"""A step of a run: gather a batch, train it, publish what came of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.outcomes import CauseKind
    from everroll.contracts.training import Phase
    from workflows import policies
    from workflows.evaluations import Evaluations
    from workflows.pausing import PauseControl
    from workflows.publishing import Publisher
    from workflows.run_core import RunCore
    from workflows.run_groups import RunGroups
    from workflows.watchdog import Watchdog

T = TypeVar("T")


class RunSteps:
    """The algorithm. A batch is the lowest-numbered ready groups, in order."""

    def __init__(
        self,
        core: RunCore,
        groups: RunGroups,
        publisher: Publisher,
        evaluations: Evaluations,
        pauses: PauseControl,
        watchdog: Watchdog,
        *,
        enter: Callable[[Phase], None],
        continue_as_new: Callable[[], Awaitable[NoReturn]],
    ) -> None:
        self._core = core
        self._groups = groups
        self._publisher = publisher
        self._evaluations = evaluations
        self._pauses = pauses
        self._watchdog = watchdog
        self._enter = enter
        self._continue_as_new = continue_as_new

    async def take(self) -> None:
        """One step; a run that plays nothing trains the batch of the same number that another run has stored.

        Raises:
            ApplicationError: what must end the run has happened.
        """
        if self._core.spec.run.mode == "train":
            await self._train_stored()
        else:
            await self._play_and_train()
        self._core.record_soon()

    async def _play_and_train(self) -> None:
        core, state = self._core, self._core.state
        self._enter(Phase.ROLLOUT)
        started = state.rollout_started_at or workflow.time()
        state.rollout_started_at = started
        self._groups.admit()
        watch = self._groups.early_end.watch_step()
        await self._wait_for_batch()
        if watch is not None:
            watch.cancel()
        self._groups.early_end.end_stragglers()
        batch = core.ledger.take_batch()
        mark = core.ledger.take_mark()
        state.rollout_started_at = None
        gathered = workflow.time()
        self._enter(Phase.TRAINING)
        self._groups.admit()
        trained = await self._unless_fatal(core.calls.train(state.step + 1, batch, mark))
        self._watchdog.note_progress()
        applied = workflow.time()
        await self._unless_fatal(self._evaluations.before_publish())
        self._enter(Phase.PUBLISHING)
        await self._publisher.publish(trained.weights)
        self._watchdog.note_progress()
        core.metrics.count_trained(len(batch))
        core.ledger.finish_step(
            batch,
            trained,
            rollout_seconds=gathered - started,
            train_seconds=applied - gathered,
            publish_seconds=workflow.time() - applied,
        )

    async def _train_stored(self) -> None:
        core = self._core
        limit = timedelta(seconds=core.spec.rollout.abort_budget.max_pause_seconds) + policies.PAUSE_GRACE
        await workflow.wait_condition(lambda: not self._pauses.paused or core.fatal is not None, timeout=limit)
        core.raise_if_fatal()
        self._enter(Phase.TRAINING)
        stored = await core.calls.read_batch(core.state.step + 1)
        batch, started = stored.build_results(), workflow.time()
        trained = await self._unless_fatal(core.calls.train(core.state.step + 1, batch, None, stored))
        self._watchdog.note_progress()
        core.metrics.count_trained(len(batch))
        seconds = workflow.time() - started
        core.ledger.finish_step(batch, trained, rollout_seconds=0.0, train_seconds=seconds, publish_seconds=0.0)

    async def _unless_fatal(self, work: Coroutine[Any, Any, T]) -> T:
        """What must end the run ends this too, as the run's cancellation would.

        A trainer finishes a step that it has begun, and resuming the run asks it first how far it is: the step is
        applied once, whether the run still hears of it or not.
        """
        task = asyncio.create_task(work)
        try:
            await workflow.wait_condition(lambda: task.done() or self._core.fatal is not None)
            if not task.done():
                self._core.raise_if_fatal()
        except (Exception, asyncio.CancelledError):  # not what ends a coroutine whose workflow leaves the cache
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        return await task

    async def _wait_for_batch(self) -> None:
        """Wait until enough groups are ready; a history that grows long meanwhile is continued as new.

        Every group settles within its own deadline, and the watchdog says what is waited for.
        """
        core = self._core
        while not core.ledger.has_batch():
            with contextlib.suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: core.ledger.has_batch() or core.fatal is not None or is_history_long(),
                    timeout=policies.group_limit(core.spec.rollout),
                )
            if core.fatal is None and not core.ledger.has_batch() and is_history_long():
                await self._continue_as_new()
            core.raise_if_fatal()

    async def settle_surplus(self) -> None:
        """All steps are taken: what was started in excess of them is settled too, so that no prompt is left open."""
        core, state = self._core, self._core.state
        if state.step < core.spec.run.num_steps:
            return  # stopped: the run may be resumed
        core.ledger.drop_surplus()
        self._groups.early_end.end_groups(sorted(state.in_flight), CauseKind.SURPLUS, "the run completed without it")
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: not state.in_flight or core.fatal is not None, timeout=policies.group_limit(core.spec.rollout)
            )
        core.ledger.drop_surplus()


def is_history_long() -> bool:
    return workflow.info().is_continue_as_new_suggested()
