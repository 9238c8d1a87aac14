"""How every Everroll process talks Temporal: one plugin with converter, payload guard and sandbox rules."""

from __future__ import annotations

import logging

from temporalio.converter import DataConverter
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

from everroll.payloads import GuardedConverter
from everroll.workflow_runner import DirectRunner

_PASSED_THROUGH = ("everroll.contracts", "pydantic", "pydantic_core", "annotated_types", "typing_extensions")


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
