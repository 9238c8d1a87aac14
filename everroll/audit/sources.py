"""Evidence as it lies: Temporal, store, journal and run directory. Reads, and judges nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

from pydantic import ValidationError
from temporalio.client import Client

from everroll.audit.evidence import (
    DirectoryManifest,
    GroupHistory,
    RunFiles,
    RunHistory,
    RunRecordFile,
    SealedDirectory,
    StepRecordFile,
    StoredGroup,
    StoredSamples,
)
from everroll.audit.histories import HistoryReader
from everroll.audit.report import AuditInputError
from everroll.contracts.rollout import BlobRef, GroupManifest, GroupResult
from everroll.contracts.steering import SteeringRecord
from everroll.contracts.training import TrainRequest
from everroll.run_files import find_steps, name_step
from everroll.sessions.digest import SessionDigest
from everroll.sessions.reading import JournalReader, JournalReadError, MalformedSessionError, RecordedSession
from everroll.store import StoreError, open_store
from everroll.tokens.samples import MalformedSamplesError, decode_samples

_CHUNK_BYTES = 1 << 20


class RecordedEvidence:
    """The evidence of one run where its run file says it lies.

    Raises ValueError for a store URL that is not supported.
    """

    def __init__(self, temporal: Client, run: str, journal: JournalReader, store_url: str, run_dir: Path) -> None:
        self._histories = HistoryReader(temporal, run)
        self._run = run
        self._journal = journal
        self._store = open_store(store_url)
        self._run_dir = run_dir

    async def read_run(self) -> RunHistory:
        return await self._histories.read_run()

    async def read_group(self, group: int) -> GroupHistory:
        return await self._histories.read_group(group)

    async def read_manifest(self, reference: BlobRef) -> StoredGroup:
        body, trouble = await asyncio.to_thread(self._read_blob, reference)
        try:
            manifest = None if body is None else GroupManifest.model_validate_json(body)
            return StoredGroup(manifest, trouble, missing=body is None)
        except ValidationError as error:
            return StoredGroup(None, trouble or f"blob {reference.uri} is no manifest: {error}")

    async def read_samples(self, reference: BlobRef) -> StoredSamples:
        body, trouble = await asyncio.to_thread(self._read_blob, reference)
        try:
            samples = None if body is None else decode_samples(body)
            return StoredSamples(samples, trouble, missing=body is None)
        except MalformedSamplesError as error:
            return StoredSamples(None, trouble or f"blob {reference.uri}: {error}")

    async def read_session(self, session_id: str) -> RecordedSession | None:
        try:
            return await self._journal.read_session(session_id)
        except MalformedSessionError:
            raise  # a finding about one session, where the others can be looked at
        except JournalReadError as error:
            raise AuditInputError(str(error)) from error

    async def read_digest(self, session_id: str) -> SessionDigest | None:
        try:
            return await self._journal.read_digest(session_id)
        except MalformedSessionError:
            raise
        except JournalReadError as error:
            raise AuditInputError(str(error)) from error

    async def read_files(self) -> RunFiles:
        if not self._run_dir.is_dir():
            raise AuditInputError(
                f"run {self._run}: no run directory at {self._run_dir.absolute()}; name it with --run-dir"
            )
        return await asyncio.to_thread(read_run_files, self._run_dir)

    async def read_played(self, directory: Path, step: int) -> TrainRequest | None:
        path = directory / "requests" / f"{name_step(step)}.json"
        try:
            return TrainRequest.model_validate_json(await asyncio.to_thread(path.read_bytes))
        except (OSError, ValidationError):
            return None

    def _read_blob(self, reference: BlobRef) -> tuple[bytes | None, str | None]:
        """A blob, and what is wrong with it. One that was changed is read all the same: the audit says where."""
        store = self._store
        try:
            return store.get(reference), None
        except StoreError as error:
            trouble = str(error)
        try:
            return (store.root / reference.uri).read_bytes(), trouble
        except OSError:
            return None, trouble


def read_run_files(root: Path) -> RunFiles:
    """What a run directory holds of steps; every file that is kept is hashed."""
    records: dict[int, StepRecordFile] = {}
    unreadable: dict[int, str] = {}
    for step, path in find_steps(root / "steps"):
        if step in records:
            unreadable[step] = f"{path.name} is another record of it"
            continue
        try:
            records[step] = StepRecordFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            unreadable[step] = str(error)
    metric_lines, malformed_line = _read_metrics(root / "metrics.jsonl")
    forked_at, executions = _read_origin(root / "run.json")
    run_record, run_trouble = _read_run_record(root / "run.json")
    steerings, malformed_steering = _read_steerings(root / "steering.jsonl")
    return RunFiles(
        path=root,
        records=records,
        unreadable=unreadable,
        metric_lines=metric_lines,
        malformed_line=malformed_line,
        weights=_read_all_sealed(root / "weights"),
        checkpoints=_read_all_sealed(root / "checkpoints"),
        steerings=steerings,
        malformed_steering=malformed_steering,
        requests=_read_requests(root / "requests"),
        run_record=run_record,
        run_trouble=run_trouble,
        settled=_read_settled(root / "settled"),
        forked_at=forked_at,
        executions=executions,
    )


def _read_origin(path: Path) -> tuple[int, list[str]]:
    """Step that the run was forked at (0 for one that was not), and the executions that began or resumed it."""
    try:
        record = json.loads(path.read_bytes())
        origin = record.get("forked_from")
        return int(origin["step"]) if origin else 0, [str(name) for name in record.get("executions", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, []


def _read_run_record(path: Path) -> tuple[RunRecordFile | None, str | None]:
    """The record, or why it cannot be read."""
    try:
        return RunRecordFile.model_validate_json(path.read_bytes()), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValidationError) as error:
        return None, f"{error}"[:300]


def _read_metrics(path: Path) -> tuple[list[tuple[int, dict[str, float]]], int | None]:
    """Steps and their metrics, and the number of the first line that is no step's, from 1."""
    lines = []
    for number, line in enumerate(_read_whole_lines(path), start=1):
        try:
            values = json.loads(line)
            lines.append((int(values.pop("step")), values))
        except (ValueError, KeyError, TypeError, AttributeError):
            return lines, number
    return lines, None


def _read_steerings(path: Path) -> tuple[list[SteeringRecord], int | None]:
    """What was asked, and the number of the first line that cannot be read, from 1."""
    records = []
    for number, line in enumerate(_read_whole_lines(path), start=1):
        try:
            records.append(SteeringRecord.model_validate_json(line))
        except ValidationError:
            return records, number
    return records, None


def _read_requests(parent: Path) -> dict[int, TrainRequest | None]:
    """A live trainer removes old ones meanwhile; a step that has two files has none that can be read."""
    requests: dict[int, TrainRequest | None] = {}
    for step, path in find_steps(parent):
        try:
            request = TrainRequest.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValidationError):
            request = None
        requests[step] = None if step in requests else request
    return requests


def _read_settled(parent: Path) -> dict[int, GroupResult | None]:
    settled: dict[int, GroupResult | None] = {}
    for path in sorted(parent.glob("group_*.json")):
        try:
            group = int(path.stem.removeprefix("group_"))
        except ValueError:
            continue
        try:
            settled[group] = GroupResult.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            settled[group] = None
    return settled


def _read_whole_lines(path: Path) -> list[bytes]:
    """A line that a crash cut short ends the file, and counts as not written."""
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _read_all_sealed(parent: Path) -> list[SealedDirectory]:
    """Every directory that is still there; a live trainer removes old ones meanwhile, and may replace one."""
    found = []
    for step, path in find_steps(parent):
        before = _identify(path)
        try:
            sealed = _read_sealed(step, path)
        except FileNotFoundError:
            if before is not None and _identify(path) == before:
                raise
            continue
        if _identify(path) == before:
            found.append(sealed)
    return found


def _identify(path: Path) -> int | None:
    """Tells one directory from another of its name; None where there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _read_sealed(step: int, path: Path) -> SealedDirectory:
    hashes = {
        file.name: _hash_file(file)
        for file in sorted(path.iterdir())
        if file.is_file() and file.name != "manifest.json"
    }
    return SealedDirectory(step, path, _read_manifest(path / "manifest.json"), hashes, *_read_state(path))


def _read_manifest(path: Path) -> DirectoryManifest | None:
    try:
        return DirectoryManifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _read_state(path: Path) -> tuple[int | None, StepRecordFile | None]:
    try:
        state = json.loads((path / "trainer_state.json").read_bytes())
        record = state["record"]
        return int(state["step"]), None if record is None else StepRecordFile.model_validate(record)
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
