"""I1 and the order of I3 from the run's own history: what became of every group that was dispensed. Pure.

The events are folded as the run's ledger does it, written anew: dispensed groups are in flight, then ready or dropped,
and a batch is the lowest-numbered ready groups that are not stale. A stale group may be dispensed again, where that is
the policy; what is left over when the run has taken all its steps is surplus.
"""

from __future__ import annotations

from itertools import pairwise

from everroll.audit.account import Account
from everroll.audit.bounds import Bounds
from everroll.audit.evidence import (
    BatchRead,
    Changed,
    Dispensed,
    Generation,
    Planned,
    Published,
    Recorded,
    RunHistory,
    Settled,
    Skipped,
    StepCompleted,
    StepScheduled,
)
from everroll.audit.orders import check_order
from everroll.audit.report import Breach, Findings, Invariant
from everroll.audit.resumption import adopt_restored
from everroll.audit.stored_batches import check_told
from everroll.audit.totals import Totals, sort_counts
from everroll.contracts.batches import StoredBatch
from everroll.contracts.names import ATTEMPTS_PER_RESUME
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import RunState, TrainRequest

_MAX_STALE_REFILLS = 3
ONCE = "prompts dispensed in order and settled once"
PLANNED = "prompts are the curriculum's, where there is one"
CARRIED = "state carried through continue-as-new"
BATCHES = "batches: lowest ready groups, in order"
STEPS = "steps scheduled once, in order"
_I1, _I3 = Invariant.SETTLED_ONCE, Invariant.STEPS


def settle_groups(history: RunHistory, findings: Findings) -> Account:
    """Fold all events; notes breaches of I1 and of the order of batches."""
    fold = _Fold(history, findings)
    for generation in history.generations:
        fold.take_generation(generation)
    fold.close()
    return fold.account


class _Fold:
    def __init__(self, history: RunHistory, findings: Findings) -> None:
        self.account = Account()
        self._history = history
        self._findings = findings
        self._spec = history.spec
        """As it was changed up to the event that is looked at."""
        self._bounds = Bounds(history.spec)
        self._skipping: set[int] = set()
        """Groups in flight that are dropped whatever they bring."""
        self._restored = history.is_cut
        """Whether the next state says what is known of what came before."""
        self._totals = Totals()
        self._batches: dict[int, StoredBatch] = {}
        """What another run has played, by step, as this one was told."""
        self._batch_size = history.spec.rollout.groups_per_step
        self._latest: dict[int, int] = {}
        """Group to the workflow task during which it came in."""
        self._settled_at: dict[int, int] = {}
        self._last_task: int | None = None
        """Of the generation that is being folded, if its number of tasks is known."""
        self._times_stale: dict[int, int] = {}
        self._again: set[int] = set()
        """Stale groups that are to be dispensed again."""
        self._ended_last: list[int] = []
        """Groups ended from outside since the run did anything: at the end of its history, the run itself did it."""
        self._settled_last: set[int] = set()
        """Groups settled since the run did anything, however: at the end, it may not have listened any more."""

    def take_generation(self, generation: Generation) -> None:
        self._spec = generation.spec or self._spec
        if generation.restores:
            self._restored = True
            return  # its publishes are of a step that the next one begins with
        self._bounds.begin(self._spec)
        specs = self.account.specs
        if self._restored:
            specs.clear()  # the settings were read from the run directory
        if not specs or specs[-1] != self._spec:
            specs.append(self._spec)
        if generation.start is not None and self._restored:
            plays = self._history.spec.run.mode != "train"
            self._again = adopt_restored(self.account, generation.start, self._ended_last, self._findings, plays=plays)
            self._settled_last.clear()
            self._skipping = set(generation.start.skipping)
            self._totals.begin(generation.start, self.account.fates)
            self._restored = False
        elif generation.start is not None:
            self._reopen_unheard(generation.start)
            self._compare_carried(generation.start, generation.run_id)
        self._latest, self._settled_at = {}, {}
        self._last_task = None if generation.num_tasks is None else generation.num_tasks - 1
        for event in generation.events:
            if not isinstance(event, Settled | Planned | Recorded):
                self._ended_last.clear()
                self._settled_last.clear()
            if isinstance(event, Dispensed):
                self._dispense(event)
            elif isinstance(event, Settled):
                self._settle(event)
            elif isinstance(event, StepScheduled):
                self._schedule(event)
            elif isinstance(event, StepCompleted):
                self._complete(event)
            elif isinstance(event, BatchRead):
                self._batches[event.step] = event.batch
            elif isinstance(event, Published):
                self._publish(event.version)
            elif isinstance(event, Changed):
                self._change(event)
            elif isinstance(event, Recorded):
                self._record(event.spec)
            elif isinstance(event, Skipped):
                self._skip(event.group)
            elif isinstance(event, Planned):
                self.account.planned.update(enumerate(event.prompts, start=event.first_group))

    def _dispense(self, event: Dispensed) -> None:
        account, request = self.account, event.request
        group = request.group
        wanted = len(account.dispensed)
        again = group in self._again
        text = "the group was dispensed again" if group in account.dispensed else "groups are not dispensed in order"
        breach = Breach(invariant=_I1, group=group, message=text, expected=f"group {wanted}", found=f"group {group}")
        self._findings.expect(ONCE, again or group == wanted, breach)
        if again:
            self._again.remove(group)
            account.results.pop(group, None)
            account.dispensed[group] = request
        planned = account.planned.get(group)
        breach = Breach(
            invariant=_I1,
            group=group,
            message="the group was given another prompt than the curriculum chose",
            expected=str(planned),
            found=str(request.prompt_index),
        )
        self._findings.expect(PLANNED, request.prompt_index == planned, breach)
        account.dispensed.setdefault(group, request)
        account.in_flight.add(group)
        account.most_open = max(account.most_open, account.count_open())
        self._bounds.check(account, group, event.task, self._findings)

    def _change(self, event: Changed) -> None:
        self._spec = event.spec
        self.account.specs.append(event.spec)
        self._bounds.change(event.spec, event.task)
        self._drop_stale()

    def _record(self, spec: RunSpec) -> None:
        """What held before was overwritten; what was changed since may be written down or not."""
        specs = self.account.specs
        if spec in specs:
            newest = len(specs) - 1 - specs[::-1].index(spec)
            del specs[:newest]

    def _skip(self, group: int) -> None:
        account = self.account
        if group in account.in_flight:
            self._skipping.add(group)
            return
        account.ready.pop(group, None)
        self._again.discard(group)
        account.fates[group] = "dropped: skipped"

    def _settle(self, event: Settled) -> None:
        account, group = self.account, event.group
        if event.result is None and event.ending not in ("canceled", "terminated"):
            return  # it failed the run; what is left in flight is seen at the end
        if group not in account.in_flight:
            text = "settled again" if group in account.dispensed else "settled without having been dispensed"
            fate = account.fates.get(group, "ready" if group in account.ready else "unknown")
            found = "settled once more"
            breach = Breach(invariant=_I1, group=group, message=f"the group was {text}", expected=fate, found=found)
            self._findings.add(ONCE, breach)
            return
        account.in_flight.remove(group)
        self._settled_at[group] = event.task
        self._settled_last.add(group)
        if event.result is None:
            self._ended_last.append(group)
        if event.result is None or group in self._skipping:
            self._skipping.discard(group)
            account.fates[group] = "dropped: skipped"
            return
        account.results[group] = event.result
        if event.result.group != group:
            text = "a group was settled with the result of another"
            breach = Breach(
                invariant=_I1, group=group, message=text, expected=str(group), found=str(event.result.group)
            )
            self._findings.add(ONCE, breach)
        if event.result.dropped is not None:
            account.fates[group] = f"dropped: {event.result.dropped.kind.value}"
            return
        account.ready[group] = event.result
        self._latest[group] = event.task
        self._drop_stale()

    def _schedule(self, event: StepScheduled) -> None:
        request = event.request
        account, step = self.account, request.step
        wanted = max([account.by_record, *account.requests]) + 1
        fresh = step not in account.requests
        text = "the steps are not taken in order" if fresh else "the step was handed to the trainer again"
        breach = Breach(invariant=_I3, step=step, message=text, expected=f"step {wanted}", found=f"step {step}")
        self._findings.expect(STEPS, step == wanted and fresh, breach)
        check_order(request, self._spec, account.version, self._findings)
        if self._history.spec.run.mode != "train":
            self._compare_batch(request, event.task)
        else:  # another run dispensed and settled these groups
            check_told(request, self._batches.get(step), self._findings)
        for item in request.batch:
            account.ready.pop(item.group, None)
            if account.trained_at.setdefault(item.group, step) != step:
                earlier = account.trained_at[item.group]
                breach = Breach(
                    invariant=_I1,
                    step=step,
                    group=item.group,
                    message="the group is trained twice",
                    expected=f"step {earlier} only",
                    found=f"step {step} too",
                )
                self._findings.add(ONCE, breach)
        if account.in_training:
            text = "a step was handed over before the one before it was answered"
            breach = Breach(invariant=_I3, step=step, message=text, expected=f"an answer for step {wanted - 1}")
            self._findings.add(STEPS, breach.model_copy(update={"found": "none"}))
        account.in_training += [item.group for item in request.batch]
        account.requests.setdefault(step, request)

    def _compare_batch(self, request: TrainRequest, task: int) -> None:
        """The batch is the lowest ready groups in ascending order, each with the manifest it was settled with.

        Groups that came in during the workflow task that took the batch may have been too late for it.
        """
        account = self.account
        self._findings.count(_I3, BATCHES)
        found = [item.group for item in request.batch]
        certain = [group for group in account.ready if self._latest.get(group, -1) < task - 1]
        passed_over = sorted(group for group in certain if group not in found and group < max(found, default=-1))
        wrong = [group for group in found if group not in account.ready]
        wrong += [right for left, right in pairwise(found) if left >= right] + passed_over
        if wrong or len(found) != self._batch_size:
            wanted = sorted(account.ready)[: self._batch_size]
            breach = Breach(
                invariant=_I3,
                step=request.step,
                group=wrong[0] if wrong else None,
                message="the batch is not the lowest-numbered ready groups in order",
                expected=str(wanted),
                found=str(found),
            )
            self._findings.add(BATCHES, breach)
        for item in request.batch:
            result = account.results.get(item.group)
            if result is not None and result.manifest != item.manifest:
                breach = Breach(
                    invariant=_I3,
                    step=request.step,
                    group=item.group,
                    message="the batch names another manifest than the group was settled with",
                    expected=result.manifest.sha256 if result.manifest else "none (dropped)",
                    found=item.manifest.sha256,
                )
                self._findings.add(BATCHES, breach)

    def _complete(self, event: StepCompleted) -> None:
        account, step = self.account, event.requested_step
        result = event.result
        version = 0 if self._history.spec.run.mode == "rollout" else step
        good = result.step == step and result.weights.version == version and step not in account.applied
        self._findings.expect(
            STEPS,
            good,
            Breach(
                invariant=_I3,
                step=step,
                message="the trainer's answer is for another step, or the step was answered before",
                expected=f"step {step}, version {version}",
                found=f"step {result.step}, version {result.weights.version}",
            ),
        )
        account.applied.setdefault(step, result)
        for group in account.in_training:
            account.fates[group] = "trained"
        account.in_training = []

    def _publish(self, version: int) -> None:
        account = self.account
        newest = account.num_steps
        breach = Breach(
            invariant=_I3,
            message="a version was published that is not the newest applied one",
            expected=f"version {newest} or, again, {account.version}",
            found=f"version {version}",
        )
        self._findings.expect(STEPS, version in (newest, account.version), breach)
        account.version = max(version, account.version)
        self._drop_stale()

    def _drop_stale(self) -> None:
        account = self.account
        for group, result in list(account.ready.items()):
            oldest = account.version if result.min_weight_version is None else result.min_weight_version
            if account.version - oldest <= self._spec.rollout.max_staleness:
                continue
            del account.ready[group]
            if self._may_be_stale_again(group):
                self._times_stale[group] = self._times_stale.get(group, 0) + 1
                self._again.add(group)
            else:
                account.fates[group] = "dropped: stale"

    def _may_be_stale_again(self, group: int) -> bool:
        rollout, times = self._history.spec.rollout, self._times_stale.get(group, 0)
        fits = (times + 2) * (rollout.max_refills + 1) <= ATTEMPTS_PER_RESUME
        return rollout.on_stale == "refill" and times < _MAX_STALE_REFILLS and fits

    def _reopen_unheard(self, state: RunState) -> None:
        """Groups that ended while the run continued as new: they were carried as in flight, and are heard of later."""
        account = self.account
        for group in set(state.in_flight) - account.in_flight:
            if self._last_task is None or self._settled_at.get(group, -1) < self._last_task:
                continue
            account.in_flight.add(group)
            for known in (account.fates, account.ready, account.results):
                known.pop(group, None)
            if group in self._again:
                self._again.remove(group)
                self._times_stale[group] -= 1

    def _compare_carried(self, state: RunState, run_id: str) -> None:
        account = self.account
        pairs: list[tuple[str, object, object]] = [
            ("next group", len(account.dispensed), state.next_group),
            ("groups in flight", sorted(account.in_flight), sorted(state.in_flight)),
            ("groups ready", sorted(account.ready), [result.group for result in state.ready]),
            ("steps", account.num_steps, state.step),
            ("groups trained", self._totals.count_trained(account.fates), state.trained_groups),
            ("groups dropped", self._totals.count_dropped(account.fates), sort_counts(state.dropped_groups)),
        ]
        for name, expected, found in pairs:
            text = f"execution {run_id} took over other {name} than its predecessor left"
            breach = Breach(invariant=_I1, message=text, expected=str(expected), found=str(found))
            self._findings.expect(CARRIED, expected == found, breach)

    def _close_surplus(self) -> None:
        """What is ready when the run completes is surplus, if the run counted just so many as that."""
        account = self.account
        left = [*account.ready, *self._again]
        counted = self._history.num_surplus - list(account.fates.values()).count("dropped: surplus")
        if left and counted == len(left):
            account.fates.update(dict.fromkeys(left, "dropped: surplus"))
            account.ready.clear()
            self._again.clear()

    def close(self) -> None:
        """What is left once the events are over."""
        account, history = self.account, self._history
        open_ = history.state == "running"
        finished = history.state == "completed" and not history.stopped
        if finished:
            self._close_surplus()
        if history.result is not None:
            unheard = set() if finished else self._settled_last
            self._totals.check_result(history.result, account.fates, self._findings, unheard)
        left = {
            **dict.fromkeys(account.in_flight, "in flight"),
            **dict.fromkeys(account.ready, "ready"),
            **dict.fromkeys(account.in_training, "in training"),
            **dict.fromkeys(self._again, "to be played again"),
        }
        if not open_ and not finished:
            account.fates.update(dict.fromkeys(self._ended_last, "ended with the run"))
        for group, where in sorted(left.items()):
            account.fates[group] = where if open_ else "ended with the run"
            if finished:
                text = f"the run completed, and the group was left {where}"
                breach = Breach(
                    invariant=_I1, group=group, message=text, expected="trained or dropped", found=f"left {where}"
                )
                self._findings.add(ONCE, breach)
        lost = sorted(set(account.dispensed) - set(account.fates))
        for group in lost if finished else []:
            breach = Breach(invariant=_I1, group=group, message="the run completed, and nothing settled the group")
            self._findings.add(ONCE, breach)
        if finished and account.num_steps != self._spec.run.num_steps:
            breach = Breach(
                invariant=_I3,
                message="the run completed with another number of steps",
                expected=str(self._spec.run.num_steps),
                found=str(account.num_steps),
            )
            self._findings.add(STEPS, breach)
