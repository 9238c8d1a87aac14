"""The places that metrics can be copied to: TensorBoard's event files, and runs at a tracking service.

Each knows what it holds already. TensorBoard's files tell it. For the services a small file does, written after each
entry; killed in between, the trainer sends that one entry again under the same step.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from everroll.store import write_durably

_START_SECONDS = 60.0

Metrics = dict[str, float]


@dataclass(frozen=True)
class Entry:
    """Numbers of a training step, or of an evaluation of the weights that a step made."""

    step: int
    """For an evaluation: the weight version."""
    metrics: Metrics
    evaluation: str = ""
    """Where an evaluation's numbers stand, `eval` or `eval/<set>`; empty for a training step."""

    @property
    def label(self) -> str:
        """Of an evaluation: unlike that of any other."""
        return f"{self.evaluation}@{self.step}"


class Sink(Protocol):
    """Takes training steps in ascending order, and evaluations when they are there."""

    def holds(self, entry: Entry) -> bool:
        """Whether it was written."""

    def write(self, entry: Entry) -> None:
        """Add an entry, and see to it that it lasts."""

    def close(self) -> None:
        """Let go of files and connections."""


class TensorBoardSink:
    """One event per entry that holds all its values, so that an entry is there whole or not at all."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._last_step, self._evaluated = _read_events(directory)
        self._writer = EventFileWriter(str(directory))

    def holds(self, entry: Entry) -> bool:
        return entry.label in self._evaluated if entry.evaluation else entry.step <= self._last_step

    def write(self, entry: Entry) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        prefix = entry.evaluation or "train"
        values = [Summary.Value(tag=f"{prefix}/{name}", simple_value=value) for name, value in entry.metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=entry.step, summary=Summary(value=values)))
        self._writer.flush()
        if entry.evaluation:
            self._evaluated.add(entry.label)
        else:
            self._last_step = entry.step

    def close(self) -> None:
        self._writer.close()


def _read_events(directory: Path) -> tuple[int, set[str]]:
    """The newest training step, and the labels of evaluations. A file that a crash cut short ends where it was cut."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    newest, evaluated = 0, set[str]()
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for content in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(content)
            prefix = event.summary.value[0].tag.rpartition("/")[0] if event.summary.value else ""
            if prefix.startswith("eval"):
                evaluated.add(Entry(event.step, {}, prefix).label)
            else:
                newest = max(newest, event.step)
    return newest, evaluated


class ServiceRun(Protocol):
    """What the runs of wandb and trackio have in common, once `WandbRun` stands before the former."""

    def log(self, metrics: Metrics, step: int) -> None: ...

    def finish(self) -> None: ...


class ServiceSink:
    """A run at a tracking service. `marker` remembers what was sent."""

    def __init__(self, run: ServiceRun, marker: Path) -> None:
        self._run = run
        self._marker = marker
        known = json.loads(marker.read_bytes()) if marker.is_file() else {}
        self._last_step = int(known.get("last_step", 0))
        self._evaluated = set(known.get("evaluated", []))

    def holds(self, entry: Entry) -> bool:
        return entry.label in self._evaluated if entry.evaluation else entry.step <= self._last_step

    def write(self, entry: Entry) -> None:
        prefix = f"{entry.evaluation}/" if entry.evaluation else ""
        self._run.log({f"{prefix}{name}": value for name, value in entry.metrics.items()}, step=entry.step)
        if entry.evaluation:
            self._evaluated.add(entry.label)
        else:
            self._last_step = entry.step
        known = {"last_step": self._last_step, "evaluated": sorted(self._evaluated)}
        write_durably(self._marker, json.dumps(known).encode())

    def close(self) -> None:
        self._run.finish()


class WandbRun:
    """wandb drops what comes with an earlier step than it has seen, and an evaluation ends when later steps have been
    logged: so steps are values here, and the axis of all charts.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log({**metrics, "step": step})

    def finish(self) -> None:
        self._run.finish()


def open_wandb(project: str, run: str, root: Path) -> ServiceRun:
    """Resumes the run of that name. Key, address and mode come from wandb's environment variables."""
    wandb = importlib.import_module("wandb")
    settings = wandb.Settings(init_timeout=_START_SECONDS, console="off", silent=True)
    return WandbRun(wandb.init(project=project, id=run, name=run, dir=str(root), resume="allow", settings=settings))


def open_trackio(project: str, run: str) -> ServiceRun:
    """Resumes the run of that name, in trackio's own directory on this machine."""
    init: Callable[..., ServiceRun] = importlib.import_module("trackio").init
    return init(project=project, name=run, resume="allow")
