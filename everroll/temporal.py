"""How every Everroll process talks Temporal: one plugin with converter, payload guard and sandbox rules."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import CompositePayloadConverter, DataConverter
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)
from temporalio.worker import UnsandboxedWorkflowRunner, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from everroll.contracts.outcomes import ErrorType
from everroll.workflow_runner import DirectRunner

MAX_PAYLOAD_BYTES = 256 * 1024
_PASSED_THROUGH = ("everroll.contracts", "pydantic", "pydantic_core", "annotated_types", "typing_extensions")


_ENCODINGS = tuple(PydanticPayloadConverter().converters.values())


class GuardedConverter(CompositePayloadConverter):
    """Pydantic models as JSON; refuses values above 256 KiB (I9): arrays belong in the store, references in history.

    It refuses where the value is given, so that a workflow or an activity fails by it; a codec would fail the workflow
    task, again and again. The SDK makes a converter for each workflow and more for each workflow task: the encodings
    are shared, since each keeps what it has worked out about types.
    """

    def __init__(self) -> None:
        super().__init__(*_ENCODINGS)

    def to_payloads(self, values: Sequence[Any]) -> list[Payload]:
        """
        Raises:
            ApplicationError: a value is too large, type `PayloadsTooLarge`; not retryable.
        """
        payloads = super().to_payloads(values)
        for payload in payloads:
            if len(payload.data) > MAX_PAYLOAD_BYTES:
                raise ApplicationError(
                    f"a payload of {len(payload.data)} bytes was about to be sent to Temporal; the limit is "
                    f"{MAX_PAYLOAD_BYTES}. It starts with: {payload.data[:200]!r}",
                    type=ErrorType.PAYLOAD_TOO_LARGE.value,
                    non_retryable=True,
                )
        return payloads


def install_runtime(metrics_address: str | None = None) -> None:
    """Send the SDK core's own log to Python's logging (by itself it writes to standard output), and serve metrics.

    Call once, in `main()`, before the first client is made. `metrics_address` is `host:port` for Prometheus to scrape:
    the SDK's metrics and Everroll's, at `/metrics`.
    """
    forwarding = LogForwardingConfig(logger=logging.getLogger("temporal_core"))
    telemetry = TelemetryConfig(
        logging=LoggingConfig(filter=TelemetryFilter("WARN", "ERROR"), forwarding=forwarding),
        metrics=PrometheusConfig(bind_address=metrics_address) if metrics_address else None,
    )
    Runtime.set_default(Runtime(telemetry=telemetry), error_if_already_set=False)


def build_data_converter() -> DataConverter:
    return DataConverter(payload_converter_class=GuardedConverter)


def build_plugin(*, sandboxed: bool = False) -> SimplePlugin:
    """The plugin that clients, workers, replayers and test environments share.

    `sandboxed`: run workflows in the SDK's sandbox, to see that they do nothing that it forbids.
    """
    configure = _configure_sandbox if sandboxed else _configure_runner
    return SimplePlugin("everroll", data_converter=build_data_converter(), workflow_runner=configure)


def _configure_runner(runner: WorkflowRunner | None) -> WorkflowRunner:
    return DirectRunner(_configure_sandbox(runner), UnsandboxedWorkflowRunner())


def _configure_sandbox(runner: WorkflowRunner | None) -> SandboxedWorkflowRunner:
    if not isinstance(runner, SandboxedWorkflowRunner):
        raise TypeError(f"Everroll's workflows are checked in the sandbox, not in {runner!r}")
    restrictions: SandboxRestrictions = runner.restrictions.with_passthrough_modules(*_PASSED_THROUGH)
    return SandboxedWorkflowRunner(restrictions=restrictions)
