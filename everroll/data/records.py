"""From a row to a prompt, and from prompts to the fingerprint of a data set. Knows no files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everroll.failures import ConfigurationError

COLUMNS = ("messages", "text", "label", "metadata")
"""All that a row may hold."""
_MAX_NAMED_FAULTS = 10
_MAX_FAULTS = 1000


@dataclass(frozen=True)
class Prompt:
    """One prompt as an agent sees it."""

    index: int
    """Row of the data set, from 0, over all its files."""
    messages: list[dict[str, Any]]
    """Chat messages. A row with `text` becomes one user message."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row as its file holds it, not yet checked."""

    where: str
    """File and line (or row, for Parquet), for people."""
    body: bytes | Mapping[str, Any]
    """A line of JSON, or the columns of a Parquet row that are not null."""


class RowError(ValueError):
    """A row is no prompt; the text says where and why."""


@dataclass(frozen=True)
class Summary:
    """What a whole pass over the rows yields."""

    fingerprint: str
    num_prompts: int


def summarize(rows: Iterable[Row], source: str) -> Summary:
    """Check every row and compute the fingerprint over the prompts in order.

    Two data sets have equal fingerprints exactly when an agent would see equal prompts at equal indices: how a file
    is laid out does not count (see docs/data.md), nor does a key whose value is null.

    Raises:
        ConfigurationError: rows that are no prompts, the first ten by name; or no rows at all.
    """
    digest = hashlib.sha256()
    faults: list[str] = []
    num_faults = num_prompts = 0
    for index, row in enumerate(rows):
        try:
            prompt = parse_row(row, index)
            digest.update(_encode_canonically(prompt, row.where))
            num_prompts += 1
        except RowError as error:
            num_faults += 1
            if len(faults) < _MAX_NAMED_FAULTS:
                faults.append(str(error))
            if num_faults >= _MAX_FAULTS:
                break
    if faults:
        raise ConfigurationError(_describe_faults(source, faults, num_faults))
    if not num_prompts:
        raise ConfigurationError(f"data set {source} holds no prompts")
    return Summary(digest.hexdigest(), num_prompts)


def parse_row(row: Row, index: int) -> Prompt:
    """
    Raises:
        RowError: it is no prompt.
    """
    record = _parse_json(row.body, row.where) if isinstance(row.body, bytes) else row.body
    record = {key: value for key, value in record.items() if value is not None}
    unknown = sorted(set(record) - set(COLUMNS))
    if unknown:
        raise RowError(f"{row.where}: unknown keys {unknown}; put what the agent needs into `metadata`")
    if ("messages" in record) == ("text" in record):
        raise RowError(f"{row.where}: give exactly one of `messages` and `text`")
    metadata = record.get("metadata")
    if isinstance(metadata, str) and not isinstance(row.body, bytes):
        metadata = _parse_json(metadata.encode(), f"{row.where}: `metadata`")
    if metadata is not None and not isinstance(metadata, dict):
        raise RowError(f"{row.where}: `metadata` must be an object")
    messages = _parse_messages(record, row.where)
    return Prompt(index=index, messages=messages, label=record.get("label"), metadata=metadata or {})


def _parse_json(body: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(body)
    except ValueError as error:
        raise RowError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise RowError(f"{where}: expected an object, found {type(record).__name__}")
    return record


def _parse_messages(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    if "text" in record:
        if not isinstance(record["text"], str):
            raise RowError(f"{where}: `text` must be a string")
        return [{"role": "user", "content": record["text"]}]
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{where}: `messages` must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"{where}: each message must be an object with a `role`")
    return messages


def _encode_canonically(prompt: Prompt, where: str) -> bytes:
    """One line of JSON with sorted keys; equal for equal prompts, whatever file they come from."""
    content = drop_nulls({"messages": prompt.messages, "label": prompt.label, "metadata": prompt.metadata})
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(f"{where}: holds a value that JSON cannot express: {error}") from error
    return text.encode() + b"\n"


def drop_nulls(value: Any) -> Any:
    """Without the keys, at any depth, whose value is null: Parquet cannot tell them from keys that are not there."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def _describe_faults(source: str, faults: list[str], num_faults: int) -> str:
    if num_faults == 1:
        return faults[0]
    more = num_faults - len(faults)
    count = f"{num_faults} or more" if num_faults >= _MAX_FAULTS else str(num_faults)
    lines = faults + ([f"... and {more} more"] if more else [])
    return f"data set {source}: {count} rows are no prompts:\n" + "\n".join(f"  {line}" for line in lines)
