"""Upgrades of workflow code under open runs (docs/upgrades.md).

Where workers have versions, an execution stays with the version that began it, so that its history is replayed by the
code that wrote it. The next one, after continue-as-new, begins with the newest version.
"""

from __future__ import annotations

from typing import NoReturn

from temporalio import workflow
from temporalio.workflow import ContinueAsNewVersioningBehavior

with workflow.unsafe.imports_passed_through():
    from everroll.contracts.base import Payload


def is_newer_version_out() -> bool:
    """Whether this execution's worker version is no longer the current one. Never, where workers have no versions."""
    return workflow.info().is_target_worker_deployment_version_changed()


def continue_on_newest_version(request: Payload) -> NoReturn:
    """Continue as new, on the current version of the workers."""
    workflow.continue_as_new(request, initial_versioning_behavior=ContinueAsNewVersioningBehavior.AUTO_UPGRADE)
