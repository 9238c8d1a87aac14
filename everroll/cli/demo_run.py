"""What `everroll demo` does: make the model, start the stack, start a run as any client would, and judge it.

With `--chaos` processes are killed one after the other while it trains, each when the last one is back. It is judged by
the same measure, and every process must have been killed and come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from everroll.audit.report import AuditReport
from everroll.audit.run import Places
from everroll.chaos.killer import Killer, summarize
from everroll.cli.audit import audit_with_progress, default_journal, render_report
from everroll.cli.display import make_display, render_steps
from everroll.cli.errors import FAILED
from everroll.cli.follow import follow_quietly, print_end
from everroll.cli.progress import Progress
from everroll.client import EverrollClient, RunView
from everroll.contracts.spec import RunSpec
from everroll.local.plan import StackOptions, wanted_ports
from everroll.local.process import Child, describe_exit, read_log_tail
from everroll.local.root import find_root
from everroll.local.stack import LocalStack
from everroll.local.start import hold_stack
from everroll.local.state import StackDirectory, StackError
from everroll.local.temporal_binary import find_temporal
from everroll.runfile import load_run_file
from everroll.temporal import install_runtime

FIRST_STEPS = 3
MOST_AT_FIRST = 0.5
LAST_STEPS = 5
LEAST_AT_LAST = 0.85
_MAKE_SECONDS = 300.0
_BACK_SECONDS = 120.0
_LOOK_SECONDS = 0.5
# So that a kill is noticed within seconds.
_CHAOS_OVERRIDES = {"rollout.heartbeat_timeout_seconds": "5", "train.heartbeat_timeout_seconds": "5"}


@dataclass(frozen=True)
class Verdict:
    """Whether a run has learned."""

    passed: bool
    text: str


def judge_rewards(rewards: Sequence[float]) -> Verdict:
    """The reward must have been low in the first steps and high in the last ones."""
    if len(rewards) < FIRST_STEPS + LAST_STEPS:
        return Verdict(False, f"only {len(rewards)} steps: too few to tell whether the reward rose")
    first = sum(rewards[:FIRST_STEPS]) / FIRST_STEPS
    last = sum(rewards[-LAST_STEPS:]) / LAST_STEPS
    text = (
        f"mean reward of the first {FIRST_STEPS} steps {first:.3f} (wanted: at most {MOST_AT_FIRST}), "
        f"of the last {LAST_STEPS} {last:.3f} (wanted: at least {LEAST_AT_LAST})"
    )
    return Verdict(first <= MOST_AT_FIRST and last >= LEAST_AT_LAST, text)


class Demo:
    """One demo, with a directory and a run name of its own, so that nothing of an earlier one is in its way."""

    def __init__(self, directory: Path, seed: int, keep: bool, chaos: bool = False) -> None:
        self.name = f"demo-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        self.home = directory.absolute() / self.name
        self.seed = seed
        self.keep = keep
        self.chaos = chaos
        self.progress = Progress()
        self.quiet = False
        self.console = Console(highlight=False)

    async def run(self) -> int:
        """The whole demo; returns the exit code.

        Raises:
            StackError: the model cannot be made, or a process does not come up.
            ConnectionError: Temporal does not answer.
        """
        # The SDK warns of each broken connection while the server starts and ends, and whenever it is killed.
        install_runtime()
        for name in ("temporalio", "temporal_core"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        root = find_root()
        temporal = find_temporal()
        directory = StackDirectory(self.home)
        directory.create()
        self._say(f"everything of this demo is kept in {self.home}")
        await self._make_model(root)
        spec = self._load_spec(root)
        options = StackOptions(
            directory=self.home,
            root=root,
            temporal=temporal,
            import_path=Path.cwd(),
            model=spec.model,
            task_queue=spec.services.task_queue,
            ports=wanted_ports(spec.services),
        )
        async with hold_stack(directory, options, self._report) as stack:
            code = await self._train_and_judge(spec, stack, directory)
            if self.keep:
                await self._keep_up(stack)
        return code

    async def _make_model(self, root: Path) -> None:
        self._say("making a small language model and its prompts")
        log = self.home / "logs" / "make.log"
        argv = (sys.executable, "-m", "examples.calculator.make", "--out", str(self.home), "--seed", str(self.seed))
        child = await Child.start(argv, root, log)
        try:
            code = await asyncio.wait_for(child.wait(), _MAKE_SECONDS)
        except TimeoutError as error:
            raise StackError(f"making the model took more than {_MAKE_SECONDS:.0f} s; see {log}") from error
        finally:
            await child.stop()
        if code != 0:
            raise StackError(f"making the model {describe_exit(code)}:\n{read_log_tail(log)}")

    def _load_spec(self, root: Path) -> RunSpec:
        overrides = {
            "run.name": self.name,
            "run.seed": str(self.seed),
            "run.output_dir": str(self.home / "runs"),
            "model.path": str(self.home / "model"),
            "data.path": str(self.home / "prompts.jsonl"),
            **(_CHAOS_OVERRIDES if self.chaos else {}),
        }
        return load_run_file(root / "examples" / "calculator" / "run.toml", overrides)

    async def _train_and_judge(self, spec: RunSpec, stack: LocalStack, directory: StackDirectory) -> int:
        """Start the run, follow it, and tell how it went; returns the exit code."""
        addresses = stack.addresses
        services = spec.services.model_copy(update=addresses.service_defaults())
        client = await EverrollClient.connect(addresses.temporal_address, addresses.temporal_namespace)
        await client.start(spec.model_copy(update={"services": services}))
        view = await client.status(self.name)
        url = view.url(addresses.ui_url or "")
        self._say(f"run {self.name} started through the Temporal client")
        self._say(f"watch it in the web UI: {url}")
        killer = Killer(directory, self.seed, self._say, lambda: self.progress.status)
        with make_display(self.console, url) as display:
            following = follow_quietly(client, self.name, self.progress, display)
            self.quiet = self.chaos
            await _unless_failed(stack, following, killer if self.chaos else None)
        self.quiet = False
        view = await _read_end(client, self.name, self.progress)
        report = await audit_with_progress(client, self.name, self._places(), Console(stderr=True))
        return self._conclude(view, killer, report)

    def _places(self) -> Places:
        return Places(journal=default_journal(self.home))

    def _conclude(self, view: RunView, killer: Killer, report: AuditReport) -> int:
        steps = self.progress.ordered_steps
        self.console.print()
        self.console.print(render_steps(steps))
        self.console.print()
        self.console.print(render_report(report))
        self.console.print()
        print_end(self.console, view)
        spared = killer.find_spared() if self.chaos else []
        if self.chaos:
            self.console.print(summarize(killer.recoveries, spared), soft_wrap=True)
        verdict = judge_rewards([record.mean_reward for record in steps])
        opening = "The reward rose" if verdict.passed else "The reward did not rise as it should"
        self.console.print(f"{opening}: {verdict.text}", soft_wrap=True)
        self.console.print()
        self.console.print(f"checkpoints and metrics  {self.home / 'runs' / self.name}", soft_wrap=True)
        self.console.print(f"logs                     {self.home / 'logs'}", soft_wrap=True)
        if not self.keep:
            self.console.print(f"its pages in the web UI  everroll up --dir {self.home}", soft_wrap=True)
            self.console.print("leave the stack up       everroll demo --keep", soft_wrap=True)
        passed = verdict.passed and view.state == "completed" and report.passed and not spared
        return 0 if passed else FAILED

    async def _keep_up(self, stack: LocalStack) -> None:
        """Hold the stack until a signal ends it."""
        ui = stack.addresses.ui_url
        self._say(f"the stack stays up, web UI {ui}; stop it with Ctrl-C, or: everroll down --dir {self.home}")
        await stack.watch()

    def _report(self, text: str) -> None:
        """News of the stack; while processes are killed on purpose, the killer tells them."""
        if not self.quiet:
            self._say(text)

    def _say(self, text: str) -> None:
        now = datetime.now().astimezone()
        self.console.print(f"{now:%H:%M:%S}  {text}", markup=False, soft_wrap=True)


async def _unless_failed(stack: LocalStack, work: Coroutine[Any, Any, RunView], killer: Killer | None) -> None:
    """Wait for `work`, unless a process of the stack fails for good before.

    Raises:
        StackError: naming the process.
    """
    following = asyncio.create_task(work)
    others = [asyncio.create_task(stack.watch())]
    if killer is not None:
        others.append(asyncio.create_task(killer.run()))
    try:
        await asyncio.wait([following, *others], return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            if other.done():
                other.result()
        following.result()
    finally:
        following.cancel()
        for other in others:
            other.cancel()
        await asyncio.gather(following, *others, return_exceptions=True)


async def _read_end(client: EverrollClient, run: str, progress: Progress) -> RunView:
    """The run as it ended, and its last steps: the last kill may have been Temporal's, or the workflow worker's.

    Raises:
        ConnectionError: they do not come back.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _BACK_SECONDS
    while True:
        with contextlib.suppress(ConnectionError):
            view = await client.status(run)
            if view.status is not None:
                progress.add(loop.time(), view)
                return view
        if loop.time() > deadline:
            raise ConnectionError(f"after its end nobody answers for run {run}")
        await asyncio.sleep(_LOOK_SECONDS)
