"""A run that trains what another has played: its batches are those that the other has stored. Pure."""

from __future__ import annotations

from everroll.audit.report import Breach, Findings, Invariant
from everroll.contracts.batches import StoredBatch
from everroll.contracts.rollout import BlobRef
from everroll.contracts.training import GroupBatchItem, TrainRequest

TOLD = "batches are those that were read from the run that played them"
ON_DISK = "batches are those that the run that played them has in its directory"


def check_told(request: TrainRequest, told: StoredBatch | None, findings: Findings) -> None:
    """The step's batch is what `read_batch` answered for it."""
    if told is None:
        breach = _breach(request, "the trainer was given a batch that was never read", "a batch", "none")
        findings.expect(TOLD, False, breach)
        return
    wanted = _describe([(group.group, group.manifest) for group in told.groups], told.run, told.store_url)
    _compare(TOLD, request, wanted, findings)


def check_on_disk(request: TrainRequest, stored: TrainRequest, findings: Findings) -> None:
    """The step's batch is what the run that played it has stored for this step."""
    wanted = _describe(_list_items(stored.batch), stored.run, stored.store_url)
    _compare(ON_DISK, request, wanted, findings)


_Batch = tuple[list[tuple[int, BlobRef]], str, str]


def _compare(check: str, request: TrainRequest, wanted: _Batch, findings: Findings) -> None:
    found = _describe(_list_items(request.batch), request.played_by or request.run, request.store_url)
    breach = _breach(request, "another batch was trained than was played for it", _name(wanted), _name(found))
    findings.expect(check, wanted == found, breach)


def _list_items(batch: list[GroupBatchItem]) -> list[tuple[int, BlobRef]]:
    return [(item.group, item.manifest) for item in batch]


def _describe(items: list[tuple[int, BlobRef]], run: str, store_url: str) -> _Batch:
    return items, run, store_url


def _name(batch: _Batch) -> str:
    groups = ", ".join(f"group {group} ({manifest.sha256[:12]} at {manifest.uri})" for group, manifest in batch[0])
    return f"{groups} of run {batch[1]} in {batch[2]}"


def _breach(request: TrainRequest, message: str, expected: str, found: str) -> Breach:
    return Breach(invariant=Invariant.STEPS, step=request.step, message=message, expected=expected, found=found)
