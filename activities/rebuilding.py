"""A run's state, made from what lies in its directory: the records of steps and of settled groups. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everroll.contracts.curriculum import PlannedBlock
from everroll.contracts.rollout import DatasetRef, GroupResult
from everroll.contracts.spec import CurriculumSpec
from everroll.contracts.steering import MAX_STEERINGS, SteeringRecord
from everroll.contracts.training import MAX_RECENT_STEPS, RunState, StepRecord
from trainer.rundir import AppliedStep

_HOLDS_PER_RESUME = 2**32
"""More than an execution holds its groups; also beyond what earlier versions began with, the seconds since 1970."""
_SHOWN_METRICS = ("loss", "grad_norm", "entropy", "clip_fraction", "logprob_gap_mean", "learning_rate")


def build_state(
    steps: Mapping[int, AppliedStep],
    settled: Mapping[int, GroupResult],
    *,
    dataset: DatasetRef,
    num_dispensed: int = 0,
    in_flight: Iterable[int] = (),
    planned: Plan | None = None,
    steerings: Sequence[SteeringRecord] = (),
    num_resumes: int = 0,
) -> RunState:
    """The state as of the newest step.

    Every group is in one place: trained (in a step's batch), dropped or ready (on record), in flight (as told), or to
    be played again. The last are those below the cursor that nothing is known of.

    Args:
        steps: all applied steps by number.
        settled: how groups were settled, as far as that is on record.
        num_dispensed: groups that are known to have started, besides those that the records tell of.
        in_flight: groups that still play.
        planned: what the run's curriculum has chosen; None without one.
    """
    trained = find_trained(steps)
    dropped = {g: r for g, r in settled.items() if r.dropped is not None and g not in trained}
    ready = [r for g, r in settled.items() if r.dropped is None and g not in trained]
    playing = sorted(g for g in in_flight if g not in trained and g not in settled)
    next_group = max(find_cursor(steps), num_dispensed, *(g + 1 for g in (*trained, *settled, *playing)), 0)
    known = {*trained, *settled, *playing}
    replay = [group for group in range(next_group) if group not in known]
    plan = (planned or Plan()).carry_on({*replay, *playing, *(r.group for r in ready)}, next_group)
    marked = {group for record in steps.values() if record.mark for group in record.mark.dropped}
    unusable: Counter[str] = Counter()
    for result in settled.values():
        unusable.update(result.unusable)
    return RunState(
        dataset=dataset,
        step=max(steps, default=0),
        next_group=next_group,
        replay=replay,
        num_resumes=num_resumes,
        planned=plan.prompts,
        planned_until=plan.until if plan.prompts.keys() >= set(replay) else min([*replay, next_group]),
        in_flight=dict.fromkeys(playing, 0),
        ready=sorted(ready, key=lambda result: result.group),
        trained_groups=len(trained),
        dropped_groups=dict(Counter(r.dropped.kind.value for r in dropped.values() if r.dropped)),
        unmarked_dropped=sorted(group for group in dropped if group not in marked),
        unusable_episodes=dict(unusable),
        num_episodes=sum(result.num_episodes for result in settled.values()),
        num_sampled_tokens=sum(result.num_sampled_tokens for result in settled.values()),
        recent_steps=[build_step_record(record, settled) for _, record in sorted(steps.items())[-MAX_RECENT_STEPS:]],
        # Groups that still play have been told some number: those of later executions are all higher.
        hold_number=num_resumes * _HOLDS_PER_RESUME,
        steerings=list(steerings)[-MAX_STEERINGS:],
        num_steerings=steerings[-1].number if steerings else 0,
    )


@dataclass(frozen=True)
class Plan:
    """What a curriculum has chosen."""

    prompts: dict[int, int] = field(default_factory=dict)
    """Prompt by group."""
    until: int = 0
    """Groups below it, from the cursor on, need not be chosen again: the curriculum that chose is still the run's."""
    current: frozenset[int] = frozenset()
    """Groups that the run's present curriculum chose for."""

    def carry_on(self, unsettled: set[int], next_group: int) -> Plan:
        """What of it holds for a run whose cursor is at `next_group`.

        Groups that were started keep the prompt they had. Those that were not are planned already only where the same
        curriculum did it; then a resumed run plays what an undisturbed one would have played.
        """
        until = next_group
        while until in self.current:
            until += 1
        wanted = unsettled | set(range(next_group, until))
        return Plan({group: self.prompts[group] for group in sorted(wanted & self.prompts.keys())}, until)


def build_plan(blocks: Sequence[PlannedBlock], curriculum: CurriculumSpec) -> Plan:
    """From what is on record, oldest first."""
    prompts, chosen_by = dict[int, int](), dict[int, CurriculumSpec]()
    for block in blocks:
        groups = range(block.first_group, block.first_group + len(block.prompts))
        prompts |= zip(groups, block.prompts, strict=True)
        chosen_by |= dict.fromkeys(groups, block.curriculum)
    current = frozenset(group for group, choice in chosen_by.items() if choice == curriculum)
    return Plan(prompts, current=current)


def find_trained(steps: Mapping[int, AppliedStep]) -> dict[int, int]:
    """Group to the step that trained it."""
    return {item.group: step for step, record in steps.items() for item in record.batch}


def find_cursor(steps: Mapping[int, AppliedStep]) -> int:
    """The next group to start, as far as the steps tell."""
    marks = [record.mark.next_group for record in steps.values() if record.mark]
    return max([*marks, *(group + 1 for group in find_trained(steps))], default=0)


def build_step_record(record: AppliedStep, settled: Mapping[int, GroupResult]) -> StepRecord:
    """What is shown of a step. How long it took is not on record."""
    groups = [item.group for item in record.batch]
    results = [settled[group] for group in groups if group in settled]
    rewards = [result.mean_reward for result in results if result.mean_reward is not None]
    metrics = record.result.metrics
    dropped = [settled[g].dropped for g in (record.mark.dropped if record.mark else []) if g in settled]
    return StepRecord(
        step=record.result.step,
        weight_version=record.result.weights.version,
        groups=groups,
        mean_reward=sum(rewards) / len(rewards) if rewards else metrics.get("reward_mean", 0.0),
        num_episodes=sum(result.num_episodes for result in results),
        num_tokens=sum(result.num_tokens for result in results),
        num_sampled_tokens=sum(result.num_sampled_tokens for result in results),
        dropped=dict(Counter(cause.kind.value for cause in dropped if cause)),
        metrics={name: metrics[name] for name in _SHOWN_METRICS if name in metrics},
    )
