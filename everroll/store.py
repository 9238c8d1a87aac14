"""Write-once blobs behind small references.

A blob's key ends in the hash of its content, so writing it again changes nothing, and a torn or tampered one is
found when it is read. Keys are relative to the store: the same reference works wherever the store is mounted.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from everroll.contracts.rollout import BlobRef

_KEY = re.compile(r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$")


class StoreError(RuntimeError):
    """A blob is missing or does not match its hash, or the store cannot be written."""


class LocalStore:
    """Blobs as files below a directory (a shared file system when there are several machines)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, prefix: str, suffix: str, body: bytes) -> BlobRef:
        """Write `body` under `<prefix>/<sha256><suffix>`, durably and atomically.

        Raises:
            StoreError: the directory cannot be written.
        """
        digest = hashlib.sha256(body).hexdigest()
        key = f"{prefix}/{digest}{suffix}"
        path = self._path(key)
        reference = BlobRef(uri=key, sha256=digest, num_bytes=len(body))
        if path.exists() and path.stat().st_size == len(body):
            return reference
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, body)
        except OSError as error:
            raise StoreError(f"store {self.root} cannot write {key}: {error}") from error
        return reference

    def get(self, reference: BlobRef) -> bytes:
        """Read a blob and check its hash.

        Raises:
            StoreError: missing, unreadable, or not what was written.
        """
        try:
            body = self._path(reference.uri).read_bytes()
        except OSError as error:
            raise StoreError(f"store {self.root} cannot read {reference.uri}: {error}") from error
        digest = hashlib.sha256(body).hexdigest()
        if digest != reference.sha256:
            raise StoreError(f"blob {reference.uri} has sha256 {digest}, expected {reference.sha256}")
        return body

    def delete(self, reference: BlobRef) -> None:
        """Remove a blob; one that is gone already is no error.

        Raises:
            StoreError: it cannot be removed.
        """
        try:
            self._path(reference.uri).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"store {self.root} cannot delete {reference.uri}: {error}") from error

    def check_writable(self) -> None:
        """Raises StoreError when nothing can be written here."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise StoreError(f"store {self.root} is not writable: {error}") from error

    def _path(self, key: str) -> Path:
        if not _KEY.match(key) or ".." in key.split("/"):
            raise StoreError(f"not a blob key: {key!r}")
        return self.root / key


def open_store(url: str) -> LocalStore:
    """Open a store by URL: a path or `file://` URL.

    Raises:
        ValueError: a scheme that is not supported.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return LocalStore(Path(parts.path))
    if parts.scheme:
        raise ValueError(f"store URL {url!r}: only directories are supported, as a path or file:// URL")
    return LocalStore(Path(url))


def write_durably(path: Path, body: bytes) -> None:
    """Write a file so that it appears whole or not at all: temporary name, fsync, rename, fsync of the directory."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
