"""Where a step's numbers go besides `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio.

`metrics.jsonl` is the record; sinks are copies of it. After each step, and when a trainer starts, a sink is brought up
to the record, from the first step that it does not have: so a step that was trained again after a crash is not written
twice, and one that a crash kept from a sink is written later.

A sink never fails a step. Packages are imported only when a run asks for them; one that is missing is told at once,
before the first step. What a service does over the network is bounded by its own timeouts, a minute for the start.

TensorBoard's files tell which steps they hold. For the services a small file does, written after each step; killed in
between, the trainer sends that one step again under the same number.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import time
from pathlib import Path
from typing import Protocol

from everroll.contracts.outcomes import TrainingError
from everroll.contracts.spec import MetricsSpec
from everroll.store import write_durably

_LOGGER = logging.getLogger(__name__)
_START_SECONDS = 60.0

Metrics = dict[str, float]


class Sink(Protocol):
    """Takes steps in ascending order."""

    last_step: int
    """The newest step that it holds; 0 for none."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Add a step, and see to it that it lasts."""

    def close(self) -> None:
        """Let go of files and connections."""


class MetricSinks:
    """All sinks of one run."""

    def __init__(self, root: Path, run: str, spec: MetricsSpec) -> None:
        """`root` is the run's directory. Opens nothing yet."""
        self.spec = spec
        self._root = root
        self._run = run
        self._sinks: dict[str, Sink] | None = None
        self._read_bytes = 0

    def sync(self, record: Path) -> None:
        """Bring every sink up to the record, a file with a line of JSON for each step. Never fails."""
        if self._sinks is None:
            self._sinks = self._open_all()
        try:
            lines = self._read_new_lines(record) if self._sinks else []
        except (OSError, ValueError) as error:
            _LOGGER.warning("%s cannot be read, metrics sinks are behind: %r", record, error)
            return
        for name, sink in self._sinks.items():
            for line in lines:
                metrics = dict(line)
                step = int(metrics.pop("step"))
                if step > sink.last_step:
                    self._write(name, sink, step, metrics)

    def close(self) -> None:
        for name, sink in (self._sinks or {}).items():
            try:
                sink.close()
            except Exception as error:
                _LOGGER.warning("metrics sink %s could not be closed: %r", name, error)
        self._sinks = None

    def _write(self, name: str, sink: Sink, step: int, metrics: Metrics) -> None:
        try:
            sink.write(step, metrics)
        except Exception as error:  # whatever a sink's library raises, training goes on
            _LOGGER.warning("metrics sink %s has no step %d: %r", name, step, error)

    def _read_new_lines(self, record: Path) -> list[Metrics]:
        if not record.is_file():
            return []
        with record.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _open_all(self) -> dict[str, Sink]:
        sinks: dict[str, Sink] = {}
        for name, wanted in _list_wanted(self.spec).items():
            if not wanted:
                continue
            try:
                sinks[name] = self._open(name, str(wanted))
            except Exception as error:
                _LOGGER.warning("metrics sink %s cannot be opened, the run goes on without it: %r", name, error)
        return sinks

    def _open(self, name: str, project: str) -> Sink:
        if name == "tensorboard":
            return TensorBoardSink(self._root / "tensorboard")
        marker = self._root / f"{name}.json"
        if name == "wandb":
            return ServiceSink(open_wandb(project, self._run, self._root), marker)
        return ServiceSink(open_trackio(project, self._run), marker)


def check_packages(spec: MetricsSpec) -> None:
    """Raises TrainingError if a sink's package is missing."""
    for name, wanted in _list_wanted(spec).items():
        if wanted and importlib.util.find_spec(name) is None:
            how = "'everroll[tensorboard]'" if name == "tensorboard" else name
            raise TrainingError(f"train.metrics asks for {name}, which is not installed: pip install {how}")


def _list_wanted(spec: MetricsSpec) -> dict[str, bool | str | None]:
    return {"tensorboard": spec.tensorboard, "wandb": spec.wandb_project, "trackio": spec.trackio_project}


class TensorBoardSink:
    """One event per step that holds all its values, so that a step is there whole or not at all."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self.last_step = _read_last_step(directory)
        self._writer = EventFileWriter(str(directory))

    def write(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"train/{name}", simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()
        self.last_step = step

    def close(self) -> None:
        self._writer.close()


def _read_last_step(directory: Path) -> int:
    """A file that a crash cut short ends where it was cut."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    newest = 0
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for content in RawEventFileLoader(str(path)).Load():
            newest = max(newest, Event.FromString(content).step)
    return newest


class ServiceRun(Protocol):
    """What the runs of wandb and trackio have in common."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def finish(self) -> None: ...


class ServiceSink:
    """A run at a tracking service. `marker` remembers the newest step that was sent."""

    def __init__(self, run: ServiceRun, marker: Path) -> None:
        self._run = run
        self._marker = marker
        self.last_step = int(json.loads(marker.read_bytes())["last_step"]) if marker.is_file() else 0

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)
        write_durably(self._marker, json.dumps({"last_step": step}).encode())
        self.last_step = step

    def close(self) -> None:
        self._run.finish()


def open_wandb(project: str, run: str, root: Path) -> ServiceRun:
    """Resumes the run of that name. Key, address and mode come from wandb's environment variables."""
    wandb = importlib.import_module("wandb")
    settings = wandb.Settings(init_timeout=_START_SECONDS, console="off", silent=True)
    opened: ServiceRun = wandb.init(project=project, id=run, name=run, dir=str(root), resume="allow", settings=settings)
    return opened


def open_trackio(project: str, run: str) -> ServiceRun:
    """Resumes the run of that name, in trackio's own directory on this machine."""
    opened: ServiceRun = importlib.import_module("trackio").init(project=project, name=run, resume="allow")
    return opened
