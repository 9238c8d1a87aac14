"""Names and manifests in a run's directory: what the trainer writes, and what others look at without the trainer."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from everroll.contracts.base import Payload

MANIFEST_NAME = "manifest.json"
_STEP_PREFIX = "step_"


class FileEntry(Payload):
    """One file of a directory."""

    sha256: str
    num_bytes: int


class Manifest(Payload):
    """What a complete directory holds, itself left out."""

    schema_version: int = 1
    files: dict[str, FileEntry]


class IncompleteDirectoryError(Exception):
    """A directory has no manifest that fits; the text says what is wrong with it."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest, after a look at names and sizes only.

    Raises:
        IncompleteDirectoryError: missing, unreadable, or files are missing or of another size.
    """
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST_NAME).read_bytes())
        for name, entry in manifest.files.items():
            size = (directory / name).stat().st_size
            if size != entry.num_bytes:
                raise IncompleteDirectoryError(f"{directory / name} has {size} bytes, expected {entry.num_bytes}")
    except (OSError, ValidationError) as error:
        raise IncompleteDirectoryError(f"{directory} is not complete: {error}") from error
    return manifest


def is_complete(directory: Path) -> bool:
    """Whether `read_manifest` accepts it."""
    try:
        read_manifest(directory)
    except IncompleteDirectoryError:
        return False
    return True


def name_step(step: int) -> str:
    return f"{_STEP_PREFIX}{step:06d}"


def find_steps(parent: Path) -> list[tuple[int, Path]]:
    """What is there of each step, `step_000012` or `step_000012.json`, in ascending order."""
    found = [
        (path.name.removesuffix(".json").removeprefix(_STEP_PREFIX), path) for path in parent.glob(f"{_STEP_PREFIX}*")
    ]
    return sorted((int(number), path) for number, path in found if number.isdigit())
