"""The engine itself: a thread that runs the model, fed by an event loop that never waits for it.

The loop hands commands over through a queue; the thread runs them between two steps, so that each sees a batch at rest.
Results go back to the loop once per step. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, TypeVar

from everroll.engines.embedded.runner import ModelRunner
from everroll.engines.embedded.scheduler import Forward, Scheduler
from everroll.engines.embedded.sequence import Finish, FinishKind, Sequence
from everroll.engines.embedded.weights import LoadedWeights, TargetTensors, apply_weights

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)
_UNHEALTHY_AFTER_STEPS = 3


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """A look at the engine between two steps."""

    num_running: int
    num_waiting: int
    num_cached_blocks: int
    is_paused: bool

    @property
    def num_unfinished(self) -> int:
        return self.num_running + self.num_waiting


class EngineCore:
    """Owns the torch thread. Methods that return a future or a coroutine are for the event loop."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, model_path: str, weight_version: int = 0) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self.weight_version = weight_version
        self.model_path = model_path
        self.targets = TargetTensors.of(runner.model.module)
        self._is_paused = False
        self._is_stopping = False
        self._failure: str | None = None
        self._num_failed_steps = 0
        """Failed steps since the last good one."""
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._submit_lock = threading.Lock()
        self._is_closed = False
        self._waiters: dict[int, Future[Sequence]] = {}
        self._thread = threading.Thread(target=self._run, name="everroll-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self, timeout_seconds: float = 10.0) -> None:
        """Abort what is in flight and end the thread."""
        with contextlib.suppress(EngineStoppedError):
            self._submit(self._stop)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout_seconds)

    @property
    def failure(self) -> str | None:
        """Why the engine is not healthy: its thread has ended, or step after step fails."""
        if not self._thread.is_alive():
            return self._failure or "the engine's thread has ended"
        return self._failure if self._num_failed_steps >= _UNHEALTHY_AFTER_STEPS else None

    async def generate(self, sequence: Sequence) -> Sequence:
        """Run a sequence to its end. Cancelling this drops it from the batch."""
        waiter: Future[Sequence] = Future()
        self._submit(lambda: self._add(sequence, waiter))
        try:
            return await asyncio.wrap_future(waiter)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineStoppedError):
                self._submit(lambda: self._abort(lambda other: other is sequence, Finish(FinishKind.ABORT)))
            raise

    async def pause(self, mode: PauseMode) -> int:
        """Stop stepping. Returns the number of unfinished sequences left."""
        return await self._call(lambda: self._pause(mode))

    async def resume(self) -> None:
        await self._call(self._resume)

    async def abort(self, which: Callable[[Sequence], bool], message: str) -> None:
        """Abort the sequences chosen by `which`, running or waiting."""
        await self._call(lambda: self._abort(which, Finish(FinishKind.ABORT, message=message)))

    async def update_weights(self, weights: LoadedWeights, version: int | None, abort_all: bool) -> int:
        """Serve new weights from the next step on, sequences in flight included. Returns how many those are."""
        return await self._call(lambda: self._update_weights(weights, version, abort_all))

    async def set_weight_version(self, version: int) -> None:
        """Call the weights that serve now by another version."""
        await self._call(lambda: self._set_weight_version(version))

    async def flush_cache(self) -> bool:
        """Forget the prefix cache; False (and nothing done) while any sequence is unfinished."""
        return await self._call(self._flush_cache)

    async def inspect(self) -> EngineState:
        return await self._call(self._inspect)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps."""
        answer: Future[T] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._submit(command)
        return await asyncio.wrap_future(answer)

    def _submit(self, command: Callable[[], None]) -> None:
        """Queue a command; it is certain to run, since the thread closes the queue before its last look into it."""
        with self._submit_lock:
            if self._is_closed:
                raise EngineStoppedError(self.failure)
            self._commands.put(command)

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._run_commands()
                if self._has_work():
                    self._step_or_abort()
        except BaseException as error:
            self._failure = f"the engine's thread failed: {error!r}"
            _LOGGER.exception("the engine's thread failed")
        finally:
            self._is_stopping = True
            with self._submit_lock:
                self._is_closed = True
            self._abort(lambda _: True, Finish(FinishKind.ABORT, message="the engine is stopping"))
            self._run_commands()

    def _has_work(self) -> bool:
        return not self._is_paused and not self._is_stopping and self._scheduler.num_unfinished > 0

    def _run_commands(self) -> None:
        """Run all commands; wait for one when there is nothing else to do."""
        if not self._has_work() and not self._is_stopping:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _step_or_abort(self) -> None:
        """A step that fails (out of memory, say) costs its batch, not the engine."""
        try:
            self._step()
        except Exception as error:
            _LOGGER.exception("a step failed; its requests are aborted")
            self._num_failed_steps += 1
            self._failure = f"the last {self._num_failed_steps} steps failed: {error!r}"
            message = f"the engine failed: {error!r}"
            self._abort(lambda _: True, Finish(FinishKind.ABORT, message=message, status_code=500))
            self._scheduler.clear_prefix_cache()
        else:
            self._num_failed_steps = 0

    def _step(self) -> None:
        self._admit()
        prefill = self._scheduler.plan_prefill()
        if prefill is not None:
            self._runner.prefill(prefill)
            for sequence, pairs in self._scheduler.finish_prefill(prefill):
                self._store_blocks(sequence, pairs)
        forwards = self._scheduler.plan_decode()
        for forward in forwards:
            self._decode(forward)
        finished = [sequence for forward in forwards for sequence in forward.sequences if sequence.finish is not None]
        for sequence in finished:
            if sequence.finish is not None and sequence.finish.kind is FinishKind.ABORT:
                self._forget_keys(sequence)
            else:
                self._store_blocks(sequence, self._scheduler.share_prefix(sequence))
        self._remove(finished)

    def _admit(self) -> None:
        admitted = self._scheduler.admit()
        if not admitted:
            return
        self._runner.kv.reserve(len(self._scheduler.running), self._scheduler.row_tokens())
        for item in admitted:
            if item.blocks:
                self._runner.kv.load_blocks(item.sequence.row, item.blocks)

    def _decode(self, forward: Forward) -> None:
        tokens, logprobs = self._runner.decode(forward)
        for sequence, token_id, logprob in zip(forward.sequences, tokens, logprobs, strict=True):
            if sequence.num_to_prefill > 0:
                continue
            sequence.num_computed += 1
            if math.isfinite(logprob):
                sequence.append(token_id, logprob, self.weight_version)
            else:
                message = f"the model's logits are not finite (weight version {self.weight_version})"
                sequence.finish = Finish(FinishKind.ABORT, message=message, status_code=500)

    def _forget_keys(self, sequence: Sequence) -> None:
        """Keys and values that are not finite would poison the next sequence in this row, masked or not."""
        self._runner.kv.zero_row(sequence.row)
        self._scheduler.clear_prefix_cache()

    def _store_blocks(self, sequence: Sequence, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            self._runner.kv.store_blocks(sequence.row, pairs)

    def _remove(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            move = self._scheduler.remove(sequence)
            if move is not None:
                self._runner.kv.move_row(move.source, move.target)
            waiter = self._waiters.pop(sequence.number)
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(sequence)

    def _add(self, sequence: Sequence, waiter: Future[Sequence]) -> None:
        self._waiters[sequence.number] = waiter
        self._scheduler.add(sequence)
        if self._is_stopping:
            self._abort(lambda other: other is sequence, Finish(FinishKind.ABORT, message="the engine is stopping"))

    def _abort(self, which: Callable[[Sequence], bool], finish: Finish) -> None:
        self._remove(self._scheduler.abort(which, finish))

    def _pause(self, mode: PauseMode) -> int:
        self._is_paused = True
        if mode == "abort":
            self._abort(lambda _: True, Finish(FinishKind.ABORT, message="generation was paused in mode abort"))
        elif mode == "retract":
            self._scheduler.retract_all()
        return self._scheduler.num_unfinished

    def _resume(self) -> None:
        self._is_paused = False

    def _update_weights(self, weights: LoadedWeights, version: int | None, abort_all: bool) -> int:
        if abort_all:
            self._abort(lambda _: True, Finish(FinishKind.ABORT, message="aborted by a weight update"))
        apply_weights(self.targets, weights)
        self._scheduler.change_weights()
        self.model_path = weights.path
        if version is not None:
            self.weight_version = version
        return self._scheduler.num_unfinished

    def _set_weight_version(self, version: int) -> None:
        self.weight_version = version

    def _flush_cache(self) -> bool:
        if self._scheduler.num_unfinished > 0:
            return False
        self._scheduler.clear_prefix_cache()
        self._runner.kv.shrink()
        return True

    def _inspect(self) -> EngineState:
        scheduler = self._scheduler
        return EngineState(len(scheduler.running), len(scheduler.waiting), scheduler.num_cached_blocks, self._is_paused)

    def _stop(self) -> None:
        self._is_stopping = True
