"""The data set of prompts: loading, fingerprint, and the deterministic order in which groups draw from it.

Group n plays position n mod N of epoch n div N. The order within an epoch is a keyed permutation that is computed,
not stored, so that any worker finds the prompt of any group without state.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everroll.contracts.rollout import DatasetRef
from everroll.failures import ConfigurationError

_ROUNDS = 4


@dataclass(frozen=True)
class Prompt:
    """One prompt as an agent sees it."""

    index: int
    """Line of the data set, from 0."""
    messages: list[dict[str, Any]]
    """Chat messages. A line with `text` becomes one user message."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataset:
    """A loaded data set."""

    fingerprint: str
    prompts: tuple[Prompt, ...]


class DatasetCache:
    """Data sets of one worker process, by fingerprint."""

    def __init__(self) -> None:
        self._datasets: dict[tuple[str, str], Dataset] = {}

    def get(self, reference: DatasetRef) -> Dataset:
        """The data set as it was when the run started.

        Raises:
            ConfigurationError: missing, unreadable, or changed since; both fingerprints are named.
        """
        key = (reference.path, reference.fingerprint)
        if key not in self._datasets:
            dataset = load_dataset(Path(reference.path))
            if dataset.fingerprint != reference.fingerprint:
                raise ConfigurationError(
                    f"data set {reference.path} changed since the run started: its fingerprint was "
                    f"{reference.fingerprint} and is now {dataset.fingerprint}. Restore the file, or start a new run."
                )
            self._datasets[key] = dataset
        return self._datasets[key]


def load_dataset(path: Path) -> Dataset:
    """Read a JSONL file of prompts.

    Raises:
        ConfigurationError: missing, empty, or a line that is no prompt; the first such line is named.
    """
    try:
        body = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"data set {path} cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(body.splitlines(), start=1) if line.strip()]
    prompts = tuple(_parse_prompt(line, index, f"{path} line {number}") for index, (number, line) in enumerate(lines))
    if not prompts:
        raise ConfigurationError(f"data set {path} holds no prompts")
    return Dataset(fingerprint=hashlib.sha256(body).hexdigest(), prompts=prompts)


def compute_prompt_index(group: int, num_prompts: int, seed: int, shuffle: bool) -> int:
    """The line that group `group` plays: position `group % num_prompts` of epoch `group // num_prompts`.

    A balanced Feistel network over the next power of four, walked until it lands inside (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002): each epoch is a permutation of all lines.
    """
    epoch, position = divmod(group, num_prompts)
    if not shuffle or num_prompts == 1:
        return position
    half_bits = max(1, ((num_prompts - 1).bit_length() + 1) // 2)
    value = position
    while True:
        value = _feistel(value, half_bits, f"{seed}:{epoch}".encode())
        if value < num_prompts:
            return value


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_index in range(_ROUNDS):
        digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, salt=bytes([round_index]), digest_size=8)
        left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
    return (left << half_bits) | right


def _parse_prompt(line: bytes, index: int, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigurationError(f"{where}: expected an object, found {type(record).__name__}")
    unknown = sorted(set(record) - {"messages", "text", "label", "metadata"})
    if unknown:
        raise ConfigurationError(f"{where}: unknown keys {unknown}; put what the agent needs into `metadata`")
    if ("messages" in record) == ("text" in record):
        raise ConfigurationError(f"{where}: give exactly one of `messages` and `text`")
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ConfigurationError(f"{where}: `metadata` must be an object")
    return Prompt(index=index, messages=_parse_messages(record, where), label=record.get("label"), metadata=metadata)


def _parse_messages(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if "text" in record:
        if not isinstance(record["text"], str):
            raise ConfigurationError(f"{where}: `text` must be a string")
        return [{"role": "user", "content": record["text"]}]
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigurationError(f"{where}: `messages` must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigurationError(f"{where}: each message must be an object with a `role`")
    return messages
