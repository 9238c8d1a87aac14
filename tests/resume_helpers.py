"""Simulated agents, engines and trainer over real run directories: what a run leaves on disk is what it resumes from.

`python -m tests.resume_helpers ADDRESS QUEUE ROOT` hosts the workers in a process that can be killed. While ROOT/hold
exists, episodes of groups at or beyond the number in it do not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from temporalio import activity
from temporalio.client import Client

from activities.claims import plan_claim, take_claim
from activities.collection import store_group
from activities.restoring import RunDirectoryActivities
from everroll.audit.histories import HistoryReader
from everroll.audit.report import Findings
from everroll.audit.settlement import settle_groups
from everroll.client import EverrollClient
from everroll.contracts import names
from everroll.contracts.rollout import EpisodeReport, EpisodeRequest, GroupResult
from everroll.contracts.spec import RunSpec
from everroll.contracts.training import (
    PrepareRunRequest,
    PrepareRunResult,
    PrepareTrainerRequest,
    TrainRequest,
    TrainResult,
    Weights,
)
from everroll.local.plan import TEMPORAL_TUNING
from everroll.local.ports import choose_port
from everroll.local.temporal_binary import find_temporal
from everroll.run_record import RunRecordDirectory
from tests.simulation import Simulation, build_spec
from trainer.durable import write_directory
from trainer.rundir import AppliedStep, RunDirectory


class RecordingSimulation(Simulation):
    """The trainer writes the records that the real one writes; its weights are a line of text."""

    def __init__(self, client: Client, root: Path) -> None:
        super().__init__(preflight=self._prepare)
        self.root = root
        self.held_from: int | None = None
        """Episodes of groups from this one on do not end."""
        self.light_activities = [
            store_group,
            RunDirectoryActivities(client).record_run,
            RunDirectoryActivities(client).restore_run,
        ]

    def run_dir(self, run: str) -> Path:
        return self.root / "runs" / run

    def directory(self, run: str) -> RunRecordDirectory:
        return RunRecordDirectory(self.run_dir(run))

    def build_spec(self, name: str, task_queue: str, /, **overrides: dict[str, object]) -> RunSpec:
        length = {"output_dir": str(self.root / "runs"), **overrides.pop("run", {})}
        services = {"store_url": str(self.root / "store"), **overrides.pop("services", {})}
        return build_spec(name, task_queue, run=length, services=services, **overrides)

    def trained_groups(self, run: str) -> list[int]:
        """Of all applied steps, in order."""
        return [item.group for record in read_applied(self.run_dir(run)) for item in record.batch]

    async def _prepare(self, request: PrepareRunRequest) -> PrepareRunResult:
        claim = plan_claim(request)
        take_claim(claim, self.dataset, request)
        return PrepareRunResult(dataset=self.dataset)

    def is_held(self, group: int) -> bool:
        return self.held_from is not None and group >= self.held_from

    @activity.defn(name=names.RUN_EPISODE)
    async def run_episode(self, request: EpisodeRequest) -> EpisodeReport:
        self.note_play(request)
        while self.is_held(request.key.group):
            activity.heartbeat("held")
            await asyncio.sleep(0.05)
        return self.play(request)

    def note_play(self, request: EpisodeRequest) -> None:
        self.episodes.append(request)

    @activity.defn(name=names.PREPARE_TRAINER)
    async def prepare_trainer(self, request: PrepareTrainerRequest) -> Weights:
        run = RunDirectory(Path(request.run_dir))
        for name in ("checkpoints", "weights", "requests", "steps"):
            (run.root / name).mkdir(parents=True, exist_ok=True)
        version = run.latest_applied()
        if version == 0:
            self._write(run, 0)
        return Weights(version=version, path=str(run.weights(version)))

    @activity.defn(name=names.TRAIN_STEP)
    async def train_step(self, request: TrainRequest) -> TrainResult:
        self.trained.append(request)
        run = RunDirectory(Path(request.run_dir))
        known = run.read_record(request.step)
        if known is not None:
            assert known.batch == request.batch
            return known.result.model_copy(update={"applied": False})
        assert run.latest_applied() == request.step - 1
        run.write_request(request)
        self._write(run, request.step)
        weights = Weights(version=request.step, path=str(run.weights(request.step)))
        result = TrainResult(step=request.step, weights=weights, metrics={"loss": 0.5})
        run.append_metrics(request.step, result.metrics)
        run.write_record(AppliedStep(batch=request.batch, weights_sha256={}, result=result, mark=request.mark))
        if self.train_gate is not None:
            await asyncio.wait_for(self.train_gate.wait(), 60)
        return result

    def _write(self, run: RunDirectory, step: int) -> None:
        for path in (run.weights(step), run.checkpoint(step)):
            write_directory(path, lambda directory: (directory / "weights.txt").write_text(str(step)) and None)


def read_applied(run_dir: Path) -> list[AppliedStep]:
    run = RunDirectory(run_dir)
    records = [run.read_record(step) for step in range(1, run.latest_applied() + 1)]
    return [record for record in records if record is not None]


def read_fates(run_dir: Path) -> dict[int, list[str]]:
    """What became of each group, by the files alone: more than one entry is one too many."""
    fates: dict[int, list[str]] = {}
    for record in read_applied(run_dir):
        for item in record.batch:
            fates.setdefault(item.group, []).append("trained")
    settled: dict[int, GroupResult] = RunRecordDirectory(run_dir).read_settled()
    for group, result in settled.items():
        if result.dropped is not None:
            fates.setdefault(group, []).append(result.dropped.kind.value)
    return dict(sorted(fates.items()))


async def audit_settlement(client: EverrollClient, run: str) -> dict[int, str]:
    """Fate of each group by the audit's own account of Temporal's history, in which it finds no breach."""
    findings = Findings()
    account = settle_groups(await HistoryReader(client.temporal, run).read_run(), findings)
    assert findings.breaches == []
    return dict(sorted(account.fates.items()))


@contextlib.contextmanager
def run_temporal(directory: Path, port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of the test's own, which it may kill; its database is in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    port = port or choose_port(0)
    command = [
        str(find_temporal()),
        *("server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port)),
        *("--db-filename", str(directory / "temporal.sqlite"), "--log-level", "error"),
        *TEMPORAL_TUNING,
    ]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait(timeout=60)


async def connect(address: str) -> EverrollClient:
    """A client of a server that may still be starting, with the search attributes registered."""
    client = await EverrollClient.connect(address, "default", 30)
    await client.register_search_attributes()
    return client


class HeldSimulation(RecordingSimulation):
    """Held by a file, so that another process can let it go; plays are written down."""

    def __init__(self, client: Client, root: Path) -> None:
        super().__init__(client, root)
        self._engine = root / "engine.txt"
        """The engine's weight version; it is not killed with the others."""
        self.weight_version = int(self._engine.read_text()) if self._engine.exists() else 0
        self.on_publish = lambda request: self._engine.write_text(str(request.weights.version)) and None

    def note_play(self, request: EpisodeRequest) -> None:
        with (self.root / "plays.txt").open("a") as file:
            file.write(f"{request.key.session_id}\n")

    def is_held(self, group: int) -> bool:
        hold = self.root / "hold"
        return hold.exists() and group >= int(hold.read_text())


@contextlib.contextmanager
def worker_process(
    address: str, task_queue: str, root: Path, module: str = "tests.resume_helpers"
) -> Iterator[subprocess.Popen[str]]:
    """The workers as a process, ready to work; killed at the end of the block."""
    command = [sys.executable, "-m", module, address, task_queue, str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@contextlib.asynccontextmanager
async def held_workers(address: str, task_queue: str, root: Path) -> AsyncIterator[None]:
    client = await connect(address)
    async with HeldSimulation(client.temporal, root).workers(client.temporal, task_queue):
        yield


def count_plays(root: Path) -> Counter[str]:
    path = root / "plays.txt"
    return Counter(path.read_text().splitlines() if path.exists() else [])


async def _serve(address: str, task_queue: str, root: Path) -> None:
    async with held_workers(address, task_queue, root):
        print(json.dumps("ready"), flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
