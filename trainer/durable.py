"""Directories that appear whole or not at all.

Files are written under a temporary name, flushed to disk and listed with their hashes in `manifest.json`; then one
rename makes the directory appear. A directory without a fitting manifest is torn, and is never used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from everroll import run_files
from everroll.run_files import MANIFEST_NAME, FileEntry, Manifest
from trainer.errors import CheckpointError

WEIGHTS_SUFFIX = ".safetensors"
_TEMPORARY_PREFIX = ".tmp-"
_CHUNK_BYTES = 1 << 20


class TornDirectoryError(CheckpointError):
    """A directory is incomplete or was changed after it was written."""


def write_directory(final: Path, fill: Callable[[Path], None]) -> Manifest:
    """Let `fill` write files into a directory that then appears at `final`, in place of one that is there.

    Raises:
        OSError: it could not be written.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.parent / f"{_TEMPORARY_PREFIX}{final.name}-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        fill(temporary)
        manifest = Manifest(files={path.name: _seal(path) for path in sorted(temporary.iterdir())})
        (temporary / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1))
        _sync(temporary / MANIFEST_NAME)
        _sync(temporary)
        if final.exists():
            remove_directory(final)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(final.parent)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest, after a look at names and sizes only.

    Raises:
        TornDirectoryError: missing, unreadable, or files are missing or of another size.
    """
    try:
        return run_files.read_manifest(directory)
    except run_files.IncompleteDirectoryError as error:
        raise TornDirectoryError(str(error)) from error


def check_directory(directory: Path) -> Manifest:
    """The manifest, after reading every file and comparing hashes.

    Raises:
        TornDirectoryError: as `read_manifest`, or a file's content is not what was written.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        digest = hash_file(directory / name)
        if digest != entry.sha256:
            raise TornDirectoryError(f"{directory / name} has sha256 {digest}, expected {entry.sha256}")
    return manifest


def remove_leftovers(parent: Path) -> None:
    """Delete what interrupted writes left behind. Only for the process that owns the run directory."""
    for path in parent.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_directory(directory: Path) -> None:
    """Delete a directory such that it is never seen half deleted."""
    doomed = directory.parent / f"{_TEMPORARY_PREFIX}old-{uuid.uuid4().hex}"
    os.rename(directory, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def link_file(source: Path, target: Path) -> None:
    """A second name for a file that is never changed; a copy where the file system knows no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def hash_weights(parent: Path, fill: Callable[[Path], None]) -> dict[str, str]:
    """The hashes of the weights files that `fill` would write; nothing stays."""
    temporary = parent / f"{_TEMPORARY_PREFIX}hash-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        fill(temporary)
        return {path.name: hash_file(path) for path in sorted(temporary.glob(f"*{WEIGHTS_SUFFIX}"))}
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _seal(path: Path) -> FileEntry:
    _sync(path)
    return FileEntry(sha256=hash_file(path), num_bytes=path.stat().st_size)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
