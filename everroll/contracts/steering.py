"""Steering a run: what may be asked of it, what it keeps of that, and which settings may change when. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from everroll.contracts.base import Payload, word_fault
from everroll.contracts.spec import RunSpec

MAX_STEERINGS = 50
"""Most steering records that a run's state holds; `<run_dir>/steering.jsonl` has them all."""

Text = Annotated[str, StringConstraints(max_length=300, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line for people."""

JsonValue = Any
"""A value as TOML and JSON have it."""

CHANGEABLE = (
    "run.num_steps",
    "rollout.max_staleness",
    "rollout.max_groups_in_flight",
    "rollout.sampling.temperature",
    "rollout.sampling.top_p",
    "rollout.sampling.top_k",
    "rollout.sampling.max_tokens",
    "train.learning_rate",
)
"""What `everroll set` may change in a running run. docs/steering.md says from when on each counts."""

FIXED_FOR_FORK = (
    "model",
    "data.seed",
    "data.shuffle",
    "train.lora",
)
"""What a fork keeps: its checkpoint and its cursor mean nothing without them. A key stands for all below it."""

FIXED = (*FIXED_FOR_FORK, "run.name", "run.seed", "rollout.episodes_per_group", "rollout.groups_per_step")
"""What a resumed run keeps: groups that were stored under these values are still to be trained."""


class SteerRequest(Payload):
    """Input of the updates `pause`, `resume` and `stop`."""

    reason: Text = ""
    by: Text = ""
    """Who asks, as `user@host`."""


class SetRequest(SteerRequest):
    """Input of the update `set`."""

    values: Annotated[dict[str, JsonValue], Field(min_length=1, max_length=32)]
    """New values by key of the run file, such as `train.learning_rate`; the key's last part will do."""


class SkipRequest(SteerRequest):
    """Input of the update `skip`."""

    group: int


class Change(Payload):
    """One setting that changed."""

    old: JsonValue
    new: JsonValue


class SteeringRecord(Payload):
    """Something that was asked of a run and accepted."""

    number: int
    """Counts from 1."""
    at: float
    """Unix seconds."""
    action: str
    """`pause`, `resume`, `stop`, `cancel`, `set`, `skip`, `evaluate`, and `resumed` or `forked` for a new beginning."""
    by: str = ""
    reason: str = ""
    step: int = 0
    """Steps that were done then."""
    group: int | None = None
    changes: dict[str, Change] = Field(default_factory=dict)

    def describe(self) -> str:
        """What was done, without when."""
        parts = [self.action if self.group is None else f"{self.action} group {self.group}"]
        parts += [f"{key} = {change.new} (was {change.old})" for key, change in self.changes.items()]
        text = " ".join(parts[:1]) + (" " + ", ".join(parts[1:]) if self.changes else "")
        text += f" by {self.by}" if self.by else ""
        return f"{text}: {self.reason}" if self.reason else text


class RefusedChangesError(ValueError):
    """Values that cannot be set; the text has a line for each."""


def apply_changes(
    spec: RunSpec, values: Mapping[str, JsonValue], changeable: Sequence[str] = CHANGEABLE
) -> tuple[RunSpec, dict[str, Change]]:
    """The run's specification with new values, and what differs from before.

    Raises:
        RefusedChangesError: keys that are unknown or must not change, and values that are not valid; all at once.
    """
    data = spec.model_dump(mode="json")
    faults, changes = [], {}
    for name, value in values.items():
        key = _find_key(name, changeable)
        if key is None:
            faults.append(f"{name}: {_explain_key(name, data, changeable)}")
            continue
        table, last = _descend(data, key)
        if table[last] != value or isinstance(value, bool) != isinstance(table[last], bool):
            changes[key] = Change(old=table[last], new=value)
        table[last] = value
    try:
        # Strict as for a run file, and through JSON, so that an integer will do for a number.
        changed = RunSpec.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        faults += [_describe_fault(data, item["loc"], item["msg"]) for item in error.errors(include_url=False)]
    if faults:
        raise RefusedChangesError("\n".join(faults))
    return changed, changes


def find_differences(old: RunSpec, new: RunSpec, keys: Sequence[str]) -> dict[str, Change]:
    """Where two specifications differ at or below some keys."""
    left, right = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    return {
        path: Change(old=left.get(path), new=right.get(path))
        for path in sorted({*left, *right})
        if left.get(path) != right.get(path) and any(path == key or path.startswith(f"{key}.") for key in keys)
    }


def describe_changes(changes: Mapping[str, Change]) -> str:
    """A line for each, with both values."""
    return "\n".join(f"- {key}: {change.old!r} before, {change.new!r} now" for key, change in changes.items())


def _find_key(name: str, changeable: Sequence[str]) -> str | None:
    found = [key for key in changeable if key == name or key.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else None


def _explain_key(name: str, data: dict[str, Any], changeable: Sequence[str]) -> str:
    if name in _flatten(data):
        return f"cannot change while the run is under way; these can: {', '.join(changeable)}"
    names = [*changeable, *(key.rpartition(".")[2] for key in changeable)]
    near = difflib.get_close_matches(name, names, n=1)
    return f"unknown; did you mean {near[0]}?" if near else f"unknown; these can change: {', '.join(changeable)}"


def _descend(data: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *tables, last = key.split(".")
    for name in tables:
        data = data[name]
    return data, last


def _describe_fault(data: dict[str, Any], location: tuple[int | str, ...], message: str) -> str:
    value: Any = data
    for part in location:
        value = value.get(part) if isinstance(value, dict) else value
    shown = "" if isinstance(value, dict) else f" = {json.dumps(value)}"
    return f"{'.'.join(map(str, location))}{shown}: {word_fault(message)}"


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    return dict(_walk(data, prefix))


def _walk(data: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
