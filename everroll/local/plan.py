"""Which processes make up the local stack, and how each is called. Pure: starts nothing, opens nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from everroll.contracts import names
from everroll.contracts.spec import ModelSection, ServicesSection
from everroll.local.process import Preload, ProcessSpec
from everroll.local.readiness import HttpReady, TemporalConnection, TemporalReady, WorkerReady
from everroll.local.state import StackAddresses

_NAMESPACE = "default"
# Measured: 3-4 times lower latency and twice the throughput of the development server's defaults.
TEMPORAL_TUNING = (
    # The server has one history shard, which by default writes one thing at a time (with SQL several are allowed), and
    # whose queues wait half a second for a workflow before they try again later: beyond 150 writes a second a run with
    # hundreds of groups got none started for half a minute.
    *("--dynamic-config-value", "history.shardIOConcurrency=8"),
    *("--dynamic-config-value", 'history.cacheNonUserContextLockTimeout="5s"'),
    *("--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=NORMAL"),
    *("--dynamic-config-value", "history.transferProcessorMaxPollRPS=2000"),
    *("--dynamic-config-value", "history.timerProcessorMaxPollRPS=2000"),
    *("--dynamic-config-value", 'history.timerProcessorMaxTimeShift="50ms"'),
    # A queue is ordered by priority within each of its partitions, of which there are four by default.
    *("--dynamic-config-value", "matching.numTaskqueueReadPartitions=1"),
    *("--dynamic-config-value", "matching.numTaskqueueWritePartitions=1"),
)
_TEMPORAL_RUNTIME = {"GOGC": "400", "GOMEMLIMIT": "1GiB", "GODEBUG": "adaptivestackstart=1"}
"""About a seventh less processor time than by Go's defaults, for more memory, up to a soft limit."""
NICENESS_OF_COMPUTING = 5
"""Of engine and trainer, which take all processors that there are: where Temporal answers late, heartbeats and workflow
tasks time out, and what was done is done again."""
_ENGINE_READY_SECONDS = 300.0
"""Loading a large model takes minutes."""

_SESSION_MODULES = ("everroll.cli.main", "everroll.sessions.server")
_ENGINE_MODULES = (
    *("everroll.cli.main", "everroll.engines.embedded.assembly"),
    *("transformers.masking_utils", "transformers.modeling_utils"),  # what every model's code imports
)
_WORKER_MODULES = {
    "workflows": ("worker.build",),
    "rollout": ("worker.build", "openai.resources.chat"),
    "trainer": ("worker.build", "activities.training", "trainer.service"),
}
_WORKER_READY_SECONDS = 180.0
"""Importing torch in several processes at once takes a while on a busy machine."""


@dataclass(frozen=True)
class WantedPorts:
    """Ports that the services would like; 0 for any."""

    temporal: int = 7233
    ui: int = 8233
    sessions: int = 8810
    engine: int = 8820


@dataclass(frozen=True)
class StackOptions:
    """What a person can choose about the local stack."""

    directory: Path
    """Where the stack keeps its data."""
    root: Path
    """Repository root, which the workers run from."""
    temporal: Path
    """The `temporal` program."""
    import_path: Path
    """Directory that agents can be imported from, besides the repository: where the person works."""
    model: ModelSection | None = None
    """Without a model, neither a session server nor an engine is started."""
    engine_urls: tuple[str, ...] = ()
    """Engines that run elsewhere; then none is started here."""
    task_queue: str = names.DEFAULT_TASK_QUEUE
    trainer_processes: int = 1
    """Processes that train together, under torchrun if there are several."""
    ports: WantedPorts = field(default_factory=WantedPorts)


def wanted_ports(services: ServicesSection) -> WantedPorts:
    """The ports that a run file names on this machine; where it names another machine, the usual ones."""
    usual = WantedPorts()
    temporal = _local_port(f"//{services.temporal_address}", usual.temporal)
    return WantedPorts(
        temporal=temporal,
        ui=usual.ui if temporal == usual.temporal else temporal + 1000,
        sessions=_local_port(services.session_url, usual.sessions),
        engine=_local_port(services.engine_urls[0], usual.engine),
    )


def last_ports(last: StackAddresses, wanted: WantedPorts) -> WantedPorts:
    """The ports of a stack that was here before, where nobody asked for others: its open runs look for it there."""
    usual = WantedPorts()
    before = WantedPorts(
        temporal=_local_port(f"//{last.temporal_address}", usual.temporal),
        ui=_local_port(last.ui_url or "", usual.ui),
        sessions=_local_port(last.session_url or "", usual.sessions),
        engine=_local_port(last.engine_urls[0] if last.engine_urls else "", usual.engine),
    )
    chosen = {
        item.name: getattr(before if getattr(wanted, item.name) == getattr(usual, item.name) else wanted, item.name)
        for item in fields(WantedPorts)
    }
    return WantedPorts(**chosen)


def choose_addresses(
    options: StackOptions, choose_port: Callable[[int], int], report: Callable[[str], None]
) -> StackAddresses:
    """Addresses of all services; `choose_port(wanted)` decides, and each other port than wanted is reported."""

    def choose(name: str, wanted: int) -> int:
        port = choose_port(wanted)
        if wanted and port != wanted:
            report(f"port {wanted} is taken; {name} uses {port}")
        return port

    temporal = choose("Temporal", options.ports.temporal)
    ui = choose("the Temporal web UI", options.ports.ui)
    addresses = StackAddresses(
        temporal_address=f"127.0.0.1:{temporal}",
        temporal_namespace=_NAMESPACE,
        ui_url=f"http://127.0.0.1:{ui}",
        task_queue=options.task_queue,
        engine_urls=list(options.engine_urls),
        store_url=str(options.directory.absolute() / "store"),
    )
    if options.model is None:
        return addresses
    session_port = choose("the session server", options.ports.sessions)
    update: dict[str, object] = {"session_url": f"http://127.0.0.1:{session_port}"}
    if not options.engine_urls:
        update["engine_urls"] = [f"http://127.0.0.1:{choose('the engine', options.ports.engine)}"]
    return addresses.model_copy(update=update)


def plan_processes(options: StackOptions, addresses: StackAddresses, admin_key: str) -> list[ProcessSpec]:
    """The stack's processes. Temporal starts first and stops last, workers start last and stop first."""
    connection = TemporalConnection(addresses.temporal_address, addresses.temporal_namespace)
    specs = [_plan_temporal(options, addresses, connection)]
    if options.model is not None:
        if not options.engine_urls:
            specs.append(_plan_engine(options, options.model, addresses))
        specs.append(_plan_session_server(options, options.model, addresses, admin_key))
    return [*specs, *_plan_workers(options, addresses, connection, admin_key)]


def _plan_temporal(options: StackOptions, addresses: StackAddresses, connection: TemporalConnection) -> ProcessSpec:
    host, _, port = addresses.temporal_address.rpartition(":")
    assert addresses.ui_url is not None
    return ProcessSpec(
        name="temporal",
        argv=(
            str(options.temporal),
            *("server", "start-dev", "--ip", host, "--port", port),
            *("--ui-port", addresses.ui_url.rpartition(":")[2]),
            *("--db-filename", str(options.directory.absolute() / "temporal.sqlite")),
            *("--log-level", "warn"),
            *TEMPORAL_TUNING,
        ),
        env={name: os.environ.get(name, value) for name, value in _TEMPORAL_RUNTIME.items()},
        ready=TemporalReady(connection),
        stage=0,
        cwd=options.directory,
        address=f"{addresses.temporal_address}, web UI {addresses.ui_url}",
    )


def _plan_engine(options: StackOptions, model: ModelSection, addresses: StackAddresses) -> ProcessSpec:
    (url,) = addresses.engine_urls
    return ProcessSpec(
        name="engine",
        argv=(*_everroll("engine"), "--model-path", model.path, "--port", _port_of(url)),
        env=_torch_environment(),
        preload=_preload_torch(options),
        modules=_ENGINE_MODULES,
        niceness=NICENESS_OF_COMPUTING,
        ready=HttpReady(f"{url}/health"),
        stage=1,
        cwd=options.directory,
        address=url,
        ready_timeout_seconds=_ENGINE_READY_SECONDS,
    )


def _plan_session_server(
    options: StackOptions, model: ModelSection, addresses: StackAddresses, admin_key: str
) -> ProcessSpec:
    assert addresses.session_url is not None
    return ProcessSpec(
        name="session-server",
        argv=(
            *_everroll("session-server"),
            *_model_flags(model),
            *("--port", _port_of(addresses.session_url)),
            *("--journal", str(options.directory.absolute() / "sessions.sqlite")),
            *("--engine-urls", *addresses.engine_urls),
        ),
        env={"EVERROLL_ADMIN_KEY": admin_key, "PYTHONPATH": _import_path(options.import_path)},
        preload=_preload_servers(options),
        modules=_SESSION_MODULES,
        ready=HttpReady(f"{addresses.session_url}/health"),
        stage=1,
        cwd=options.directory,
        address=addresses.session_url,
        ready_timeout_seconds=_WORKER_READY_SECONDS,  # a checkpoint's own template is rendered by transformers
    )


def _plan_workers(
    options: StackOptions, addresses: StackAddresses, connection: TemporalConnection, admin_key: str
) -> Iterator[ProcessSpec]:
    env = {
        "EVERROLL_TEMPORAL_ADDRESS": addresses.temporal_address,
        "EVERROLL_TEMPORAL_NAMESPACE": addresses.temporal_namespace,
        "EVERROLL_TASK_QUEUE": addresses.task_queue,
        "EVERROLL_ADMIN_KEY": admin_key,
        **_torch_environment(),
        "PYTHONPATH": _import_path(options.root, options.import_path),
    }
    queues = {
        "workflows": (addresses.task_queue, "workflow"),
        "rollout": (names.rollout_queue(addresses.task_queue), "activity"),
        "trainer": (names.train_queue(addresses.task_queue), "activity"),
    }
    for role, (queue, kind) in queues.items():
        preload = _preload_worker(options, role)
        yield ProcessSpec(
            name=f"worker-{role}",
            argv=_worker_command(role, options.trainer_processes),
            env=env | (_wait_for(options, addresses) if role == "rollout" else {}),
            niceness=NICENESS_OF_COMPUTING if role == "trainer" else 0,
            ready=WorkerReady(connection, queue, "workflow" if kind == "workflow" else "activity"),
            preload=preload,
            modules=_WORKER_MODULES[role],
            stage=2,
            # It loads while the engine does. What is no fork and imports torch by itself would hold the engine up.
            early_stage=None if preload is None else 1,
            ready_timeout_seconds=_ENGINE_READY_SECONDS + _WORKER_READY_SECONDS,
            # The user's directory: agents find their files where the user keeps them.
            cwd=options.import_path,
        )


def _wait_for(options: StackOptions, addresses: StackAddresses) -> dict[str, str]:
    """An episode needs the servers that are started here; it does not begin before they are there."""
    if options.model is None:
        return {}
    own_engines = () if options.engine_urls else addresses.engine_urls
    urls = [f"{url}/health" for url in (addresses.session_url, *own_engines)]
    return {"EVERROLL_WAIT_FOR": ",".join(urls), "EVERROLL_WAIT_SECONDS": str(_ENGINE_READY_SECONDS)}


def _import_path(*directories: Path) -> str:
    return os.pathsep.join(filter(None, [*map(str, directories), os.environ.get("PYTHONPATH")]))


def _worker_command(role: str, trainer_processes: int) -> tuple[str, ...]:
    if role != "trainer" or trainer_processes == 1:
        return (sys.executable, "-m", "worker", role)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(trainer_processes))
    return (sys.executable, "-m", *torchrun, "-m", "worker", role)


def _preload_worker(options: StackOptions, role: str) -> Preload | None:
    if role != "trainer":
        return _preload_servers(options)
    return _preload_torch(options) if options.trainer_processes == 1 else None


def _preload_servers(options: StackOptions) -> Preload:
    return Preload("preloaded", options.root)


def _preload_torch(options: StackOptions) -> Preload:
    return Preload("preloaded-torch", options.root, _torch_environment())


def _torch_environment() -> dict[str, str]:
    """Threads of torch that wait sleep instead of spinning: engine and trainer share the machine's cores."""
    return {} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE"}


def _everroll(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "everroll.cli", command)


def _model_flags(model: ModelSection) -> Iterator[str]:
    for name, value in model.model_dump().items():
        yield f"--model-{name.replace('_', '-')}"
        yield value if isinstance(value, str) else json.dumps(value)


def _local_port(url: str, usual: int) -> int:
    parts = urlsplit(url)
    return parts.port or usual if parts.hostname in ("127.0.0.1", "localhost") else usual


def _port_of(url: str) -> str:
    return url.rpartition(":")[2]
