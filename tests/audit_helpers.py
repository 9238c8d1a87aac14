"""A finished run of the real parts (workers, session server, embedded engine, trainer), and how to tamper with it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from everroll.agents import Episode
from everroll.audit.evidence import GroupHistory, RunFiles, RunHistory, StoredGroup, StoredSamples
from everroll.audit.report import AuditReport
from everroll.audit.run import audit_evidence
from everroll.audit.sources import RecordedEvidence
from everroll.client import EverrollClient
from everroll.contracts.rollout import BlobRef, GroupManifest
from everroll.contracts.spec import RunSpec
from everroll.sessions.digest import SessionDigest
from everroll.sessions.reading import RecordedSession, open_journal_reader
from everroll.sessions.server import open_app
from everroll.sessions.settings import SessionServerSettings
from everroll.store import LocalStore
from everroll.tokens.renderer import load_renderer
from everroll.tokens.samples import Sample, SampleSet, decode_samples, encode_samples
from tests.conftest import TemporalServer
from tests.conversation import converse
from tests.engine_helpers import running_engine
from tests.session_helpers import ADMIN_KEY, model_section, serve_app
from tests.small_run import make_model, write_prompts
from worker.build import build_worker
from worker.settings import Role, WorkerSettings

NUM_STEPS = 2
GROUPS_PER_STEP = 2
MEMBERS = 2
_RUN_SECONDS = 100.0


async def play(episode: Episode) -> float:
    """Two turns of one conversation; members differ in their reward."""
    async for _ in converse(episode, episode.openai(), 2):
        pass
    return 0.25 + episode.key.member / 3


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """Where a run's evidence lies."""

    home: Path
    run: str
    temporal: TemporalServer

    @property
    def journal(self) -> Path:
        return self.home / "sessions.sqlite"

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.home / "store")

    @property
    def run_dir(self) -> Path:
        return self.home / "runs" / self.run

    def copy(self, home: Path) -> FinishedRun:
        """The same evidence in another place, to be tampered with."""
        shutil.copytree(self.home, home, ignore=shutil.ignore_patterns("model"))
        return dataclasses.replace(self, home=home)

    def arguments(self) -> list[str]:
        """Of `everroll audit`."""
        places = ("--journal", str(self.journal), "--store", str(self.store.root), "--run-dir", str(self.run_dir))
        return ["audit", self.run, *places, "--address", self.temporal.address]

    def manifests(self) -> list[GroupManifest]:
        paths = sorted((self.store.root / self.run / "groups").glob("*/*.json"))
        return [GroupManifest.model_validate_json(path.read_bytes()) for path in paths]

    def edit_journal(self, sql: str, *values: object) -> None:
        with contextlib.closing(sqlite3.connect(self.journal)) as connection, connection:
            assert connection.execute(sql, values).rowcount > 0, sql

    def select(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        with contextlib.closing(sqlite3.connect(self.journal)) as connection:
            return connection.execute(sql, values).fetchall()


def make_finished_run(home: Path, name: str, task_queue: str, temporal: TemporalServer) -> FinishedRun:
    """Play the whole run in this process; everything in it is the real thing."""
    make_model(home / "model")
    write_prompts(home / "prompts.jsonl", 5)
    with running_engine(home / "model") as engine_url:
        asyncio.run(_play_run(home, name, task_queue, temporal, engine_url))
    return FinishedRun(home, name, temporal)


async def _play_run(home: Path, name: str, task_queue: str, temporal: TemporalServer, engine_url: str) -> None:
    client = await EverrollClient.connect(temporal.address, temporal.namespace)
    server = SessionServerSettings(
        model=model_section(home / "model"), engine_urls=[engine_url], journal=str(home / "sessions.sqlite")
    )
    settings = WorkerSettings(task_queue=task_queue, admin_key=ADMIN_KEY, torch_threads=1, graceful_shutdown_seconds=0)
    async with contextlib.AsyncExitStack() as stack:
        app = await stack.enter_async_context(open_app(server, load_renderer(server.model), ADMIN_KEY))
        session_url = await stack.enter_async_context(serve_app(app))
        for role in Role:
            worker = await stack.enter_async_context(build_worker(role, client.temporal, settings))
            await stack.enter_async_context(worker)
        await client.start(build_run_spec(home, name, task_queue, session_url, engine_url))
        async with asyncio.timeout(_RUN_SECONDS):
            await client.result(name)


def build_run_spec(home: Path, name: str, task_queue: str, session_url: str, engine_url: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"name": name, "num_steps": NUM_STEPS, "seed": 3, "output_dir": str(home / "runs")},
            "model": model_section(home / "model"),
            "data": {"path": str(home / "prompts.jsonl"), "seed": 1},
            "rollout": {
                "agent": {"function": "tests.audit_helpers:play"},
                "sampling": {"max_tokens": 12, "stop_token_ids": list(range(60))},
                "groups_per_step": GROUPS_PER_STEP,
                "episodes_per_group": MEMBERS,
                "max_seq_len": 80,
            },
            "train": {"learning_rate": 1e-3, "device": "cpu"},
            "services": {
                "task_queue": task_queue,
                "session_url": session_url,
                "engine_urls": [engine_url],
                "store_url": str(home / "store"),
            },
        }
    )


class Tampered(RecordedEvidence):
    """The evidence of a run, some of it altered between reading and checking.

    Temporal's history cannot be edited on disk, and neither can a blob such that its reference still fits.
    """

    change_run: Callable[[RunHistory], RunHistory] | None = None
    change_group: Callable[[GroupHistory], GroupHistory] | None = None
    change_manifest: Callable[[GroupManifest], GroupManifest] | None = None
    change_samples: Callable[[SampleSet], SampleSet] | None = None
    change_session: Callable[[RecordedSession], RecordedSession] | None = None
    change_files: Callable[[RunFiles], RunFiles] | None = None
    digests: dict[str, SessionDigest] | None = None
    """In place of those that the journal holds."""

    async def read_run(self) -> RunHistory:
        history = await super().read_run()
        return self.change_run(history) if self.change_run else history

    async def read_group(self, group: int) -> GroupHistory:
        history = await super().read_group(group)
        return self.change_group(history) if self.change_group else history

    async def read_manifest(self, reference: BlobRef) -> StoredGroup:
        stored = await super().read_manifest(reference)
        if self.change_manifest is None or stored.manifest is None:
            return stored
        return dataclasses.replace(stored, manifest=self.change_manifest(stored.manifest))

    async def read_samples(self, reference: BlobRef) -> StoredSamples:
        stored = await super().read_samples(reference)
        if self.change_samples is None or stored.sample_set is None:
            return stored
        return dataclasses.replace(stored, sample_set=self.change_samples(stored.sample_set))

    async def read_session(self, session_id: str) -> RecordedSession | None:
        session = await super().read_session(session_id)
        return self.change_session(session) if self.change_session and session else session

    async def read_digest(self, session_id: str) -> SessionDigest | None:
        return await super().read_digest(session_id) if self.digests is None else self.digests.get(session_id)

    async def read_files(self) -> RunFiles:
        files = await super().read_files()
        return self.change_files(files) if self.change_files else files


def audit_tampered(finished: FinishedRun, tamper: Callable[[Tampered], None]) -> AuditReport:
    """Audit with what `tamper` sets."""

    async def body() -> AuditReport:
        client = await EverrollClient.connect(finished.temporal.address, finished.temporal.namespace)
        journal = open_journal_reader(str(finished.journal))
        source = Tampered(client.temporal, finished.run, journal, str(finished.store.root), finished.run_dir)
        tamper(source)
        try:
            return await audit_evidence(source)
        finally:
            await journal.close()

    return asyncio.run(body())


def change_first(sample_set: SampleSet, change: Callable[[Sample], Sample]) -> SampleSet:
    """The set with its first sample changed."""
    return dataclasses.replace(sample_set, samples=(change(sample_set.samples[0]), *sample_set.samples[1:]))


def flip_token(sample: Sample, position: int) -> Sample:
    """Another token id."""
    token_ids = sample.token_ids.copy()
    token_ids[position] ^= 1
    return dataclasses.replace(sample, token_ids=token_ids)


def nudge_logprob(sample: Sample, position: int) -> Sample:
    """The next float32 below."""
    logprobs = sample.sampler_logprobs.copy()
    logprobs[position] = np.nextafter(logprobs[position], np.float32(-100))
    return dataclasses.replace(sample, sampler_logprobs=logprobs)


def mask_in(sample: Sample, position: int) -> Sample:
    """Train a token that is not trained."""
    loss_mask, versions = sample.loss_mask.copy(), sample.weight_versions.copy()
    assert not loss_mask[position]
    loss_mask[position], versions[position] = True, 0
    return dataclasses.replace(sample, loss_mask=loss_mask, weight_versions=versions)


def first_sampled(sample: Sample) -> int:
    return int(np.flatnonzero(sample.loss_mask)[0])


def rewrite_blob(store: LocalStore, reference: BlobRef, change: Callable[[Sample], Sample]) -> None:
    """Change the samples of a blob in place; its hash no longer fits."""
    changed = change_first(decode_samples(store.get(reference)), change)
    (store.root / reference.uri).write_bytes(encode_samples(changed))


def reseal(directory: Path) -> None:
    """Make a directory's manifest fit its files, as somebody would who knows how it is made."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        body = (directory / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(body).hexdigest(), "num_bytes": len(body)}
    path.write_text(json.dumps(manifest))


@contextlib.contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON file's object, written back afterwards."""
    value: dict[str, Any] = json.loads(path.read_text())
    yield value
    path.write_text(json.dumps(value))
