"""A run's numbers on their way to TensorBoard, Weights & Biases and Trackio, evaluations beside training steps.

`metrics.jsonl` and `evaluations.jsonl` are the record; sinks are copies of it. After each step, and when a trainer
starts, a sink is brought up to the record, from the first step that it does not have: so a step that was trained again
after a crash is not written twice, and one that a crash kept from a sink is written later. Evaluations end when they
end, the last one after the last step: while a trainer has a run, a thread looks for new ones every few seconds.

A sink never fails a step. Packages are imported only when a run asks for them; one that is missing is told at once,
before the first step. What a service does over the network is bounded by its own timeouts, a minute for the start.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from pathlib import Path

from pydantic import ValidationError

from everroll.contracts.evaluation import EvaluationRecord
from everroll.contracts.names import EVALUATIONS_FILE
from everroll.contracts.outcomes import TrainingError
from everroll.contracts.spec import MetricsSpec
from everroll.evaluation import list_numbers, name_numbers
from trainer.tracking import Entry, ServiceSink, Sink, TensorBoardSink, open_trackio, open_wandb

_LOGGER = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0
_STOP_SECONDS = 30.0


class MetricSinks:
    """All sinks of one run."""

    def __init__(self, root: Path, run: str, spec: MetricsSpec) -> None:
        """`root` is the run's directory. Opens nothing yet."""
        self.spec = spec
        self._root = root
        self._run = run
        self._sinks: dict[str, Sink] | None = None
        self._steps = _Lines(root / "metrics.jsonl")
        self._evaluations = _Lines(root / EVALUATIONS_FILE)
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._follower: threading.Thread | None = None

    def sync(self) -> None:
        """Bring every sink up to the record. Never fails."""
        with self._turn:
            if self._sinks is None:
                self._sinks = self._open_all()
            try:
                entries = self._read_entries() if self._sinks else []
            except (OSError, ValueError) as error:
                _LOGGER.warning("the record in %s cannot be read, metrics sinks are behind: %r", self._root, error)
                return
            for name, sink in self._sinks.items():
                for entry in entries:
                    self._write(name, sink, entry)

    def follow(self) -> None:
        """Keep an eye on evaluations until it is closed."""
        if self._follower is None and any(_list_wanted(self.spec).values()):
            self._follower = threading.Thread(target=self._watch, name="metric-sinks", daemon=True)
            self._follower.start()

    def close(self) -> None:
        """Write what has come in, and close."""
        self._stop.set()
        if self._follower is not None:
            self._follower.join(_STOP_SECONDS)
            self.sync()
        for name, sink in (self._sinks or {}).items():
            try:
                sink.close()
            except Exception as error:
                _LOGGER.warning("metrics sink %s could not be closed: %r", name, error)
        self._sinks = None

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            if self._evaluations.has_more():
                self.sync()

    def _read_entries(self) -> list[Entry]:
        """What is new, in the order of the steps; the evaluation of a step's weights after the step."""
        steps = [Entry(int(line.pop("step")), line) for line in map(json.loads, self._steps.read_new())]
        evaluations = [entry for line in self._evaluations.read_new() if (entry := _read_evaluation(line)) is not None]
        return sorted([*steps, *evaluations], key=lambda entry: (entry.step, entry.evaluation))

    def _write(self, name: str, sink: Sink, entry: Entry) -> None:
        try:
            if not sink.holds(entry):
                sink.write(entry)
        except Exception as error:  # whatever a sink's library raises, training goes on
            what = f"evaluation {entry.label}" if entry.evaluation else f"step {entry.step}"
            _LOGGER.warning("metrics sink %s has no %s: %r", name, what, error)

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


class _Lines:
    """A file that others add lines to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0
        """Bytes."""

    def has_more(self) -> bool:
        return self._path.is_file() and self._path.stat().st_size > self._num_read

    def read_new(self) -> list[bytes]:
        """Whole lines since the last call."""
        if not self.has_more():
            return []
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._num_read += len(whole)
        return whole.splitlines()


def _read_evaluation(line: bytes) -> Entry | None:
    """None for one that failed."""
    try:
        record = EvaluationRecord.model_validate_json(line)
    except ValidationError as error:
        _LOGGER.warning("a line of %s cannot be read: %s", EVALUATIONS_FILE, error)
        return None
    if record.failure is not None:
        return None
    return Entry(record.version, list_numbers(record), name_numbers(record.name))


def check_packages(spec: MetricsSpec) -> None:
    """Raises TrainingError if a sink's package is missing."""
    for name, wanted in _list_wanted(spec).items():
        if wanted and importlib.util.find_spec(name) is None:
            how = "'everroll[tensorboard]'" if name == "tensorboard" else name
            raise TrainingError(f"train.metrics asks for {name}, which is not installed: pip install {how}")


def _list_wanted(spec: MetricsSpec) -> dict[str, bool | str | None]:
    return {"tensorboard": spec.tensorboard, "wandb": spec.wandb_project, "trackio": spec.trackio_project}
