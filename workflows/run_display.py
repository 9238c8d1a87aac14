"""What people see of a run: its status, its phase in the search attributes, its page's current details."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.training import Phase, RunStatus, TrainingRunResult
    from workflows.pausing import PauseControl
    from workflows.presentation import render_details, update_search_attributes
    from workflows.run_core import RunCore
    from workflows.watchdog import Watchdog

_STEERINGS_SHOWN = 10


class RunDisplay:
    """Knows in which phase the run is."""

    def __init__(self, core: RunCore, pauses: PauseControl, watchdog: Watchdog) -> None:
        self._core = core
        self._pauses = pauses
        self._watchdog = watchdog
        self.phase = Phase.PREPARING
        self._phase_since: float | None = None

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase or self._phase_since is None:
            self._phase_since = workflow.time()
        self.phase = phase
        status = self.build_status()
        workflow.upsert_search_attributes(
            update_search_attributes(status.run, status.step, status.phase, status.mean_reward)
        )
        self.show()

    def show(self) -> None:
        """Something has changed."""
        status = self.build_status()
        self._core.metrics.show(status)
        workflow.set_current_details(render_details(status))

    def build_status(self) -> RunStatus:
        state, spec = self._core.state, self._core.spec
        return RunStatus(
            run=spec.run.name,
            phase=self._find_shown_phase(),
            step=state.step,
            num_steps=spec.run.num_steps,
            weight_version=self._core.ledger.weight_version,
            groups_in_flight=sorted(state.in_flight),
            groups_ready=len(state.ready),
            groups_wanted=spec.rollout.groups_per_step,
            next_group=state.next_group,
            trained_groups=state.trained_groups,
            dropped_groups=state.dropped_groups,
            unusable_episodes=state.unusable_episodes,
            last_cause=state.last_cause,
            num_episodes=state.num_episodes,
            num_sampled_tokens=state.num_sampled_tokens,
            mean_reward=state.recent_steps[-1].mean_reward if state.recent_steps else None,
            recent_steps=state.recent_steps,
            generation=state.generation,
            stop_requested=state.stop_requested,
            pause=state.pause,
            survey=self._watchdog.survey,
            phase_since=self._find_shown_since(),
            num_resumes=state.num_resumes,
            steerings=state.steerings[-_STEERINGS_SHOWN:],
            ready_groups=[ready.group for ready in state.ready],
            evaluations=state.evaluations,
            evaluations_in_flight=list(state.evaluations_in_flight.values()),
        )

    def build_result(self) -> TrainingRunResult:
        state, spec = self._core.state, self._core.spec
        return TrainingRunResult(
            run=spec.run.name,
            steps=state.step,
            weights=state.weights,
            trained_groups=state.trained_groups,
            dropped_groups=state.dropped_groups,
            unusable_episodes=state.unusable_episodes,
            stopped=state.stop_requested and state.step < spec.run.num_steps,
            evaluations=state.evaluations,
        )

    def _find_shown_since(self) -> float | None:
        """The step's rollout goes on through continue-as-new, and a pause has a beginning of its own."""
        state = self._core.state
        if self._find_shown_phase() is Phase.PAUSED and state.pause is not None:
            return state.pause.since
        return state.rollout_started_at if self.phase is Phase.ROLLOUT else self._phase_since

    def _find_shown_phase(self) -> Phase:
        """Paused is what holds the run up: what is under way when a pause begins ends first."""
        held_up = self._pauses.blocking or (self._pauses.paused and self.phase is Phase.ROLLOUT)
        return Phase.PAUSED if held_up else self.phase
