"""Before the first step: what the run needs is there, and its weights are out; or it goes on where it had ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.outcomes import ErrorType
    from everroll.contracts.spec import RunSpec
    from everroll.contracts.training import RunState, TrainingRunRequest, Weights
    from workflows.calls import RunCalls
    from workflows.publishing import Publisher
    from workflows.run_core import RunCore
    from workflows.watchdog import Watchdog


class Preparation:
    """Done once, by the first execution of a run."""

    def __init__(
        self,
        core: RunCore,
        publisher: Publisher,
        watchdog: Watchdog,
        request: TrainingRunRequest,
        continue_as_new: Callable[[RunSpec, RunState], Awaitable[NoReturn]],
    ) -> None:
        self._core = core
        self._publisher = publisher
        self._watchdog = watchdog
        self._request = request
        self._continue_as_new = continue_as_new
        self.restoring = request.resume is not None or request.fork is not None
        """Whether the state to go on from has not been read yet."""

    async def prepare(self) -> None:
        """
        Raises:
            ActivityError: something is not as it must be.
            ApplicationError: the run cannot start, or go on, under this name.
        """
        state, run = self._core.state, self._core.spec.run
        state.dataset = (await self._core.calls.prepare_run(self._request)).dataset
        self._watchdog.note_progress()
        weights = await self._core.calls.prepare_trainer()
        self._watchdog.note_progress()
        if self.restoring and run.mode == "rollout":
            _refuse_start(f"run {run.name} only played, and is not resumed: start another; what it stored stays of use")
        if self.restoring:
            await self._restore(weights)
        if run.mode == "train" and weights.version == 0:
            await self._core.calls.read_batch(run.num_steps)  # all that it will need is there
            state.weights = weights
            return
        if weights.version > 0:
            _refuse_start(
                f"{run.output_dir}/{run.name} holds an earlier run of this name, at step {weights.version}; go on with "
                f"it by `everroll resume`, or choose another run.name"
            )
        await self._publisher.publish(weights)
        self._watchdog.note_progress()
        state.weights = weights

    async def _restore(self, weights: Weights) -> NoReturn:
        """Go on as a new execution from the state that lies in the run directory.

        The trainer has been prepared before: no step that an earlier execution asked for is under way any more.
        """
        request, state = self._request, self._core.state
        # With a new run file, groups of the old one would go on by the old one.
        end_groups = request.fork is not None or (request.resume is not None and request.resume.from_file)
        restored = await self._core.calls.restore_run(weights.version, end_groups)
        self._watchdog.note_progress()
        if restored.spec.run.mode == "train":
            await RunCalls(restored.spec).read_batch(restored.spec.run.num_steps)
        else:
            await self._publisher.publish(weights)
        # What came in meanwhile from groups that are still under way, and from people.
        kept = {"weights": weights, "stop_requested": state.stop_requested, "budget": state.budget}
        await self._continue_as_new(restored.spec, restored.state.model_copy(update=kept))


def _refuse_start(text: str) -> NoReturn:
    raise ApplicationError(text, type=ErrorType.CONFIGURATION.value, non_retryable=True)
