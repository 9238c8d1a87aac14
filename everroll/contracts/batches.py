"""Stored batches, for a run that trains what another has played."""

from __future__ import annotations

from everroll.contracts.base import Payload
from everroll.contracts.rollout import BlobRef, GroupResult


class ReadBatchRequest(Payload):
    """Input of `read_batch`."""

    directory: str
    """A run's directory."""
    step: int


class StoredGroup(Payload):
    """What a run needs to know of a group that another one played."""

    group: int
    manifest: BlobRef
    num_episodes: int
    num_tokens: int
    num_sampled_tokens: int
    mean_reward: float | None = None


class StoredBatch(Payload):
    """Result of `read_batch`."""

    run: str
    """Which run played it."""
    store_url: str
    groups: list[StoredGroup]
    """Ordered by group index."""

    def build_results(self) -> list[GroupResult]:
        """As the run that played them was told."""
        return [GroupResult.model_validate(group.model_dump()) for group in self.groups]
