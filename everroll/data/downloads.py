"""Files behind URLs, and the local cache of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx

from everroll.data.locations import Location
from everroll.failures import ConfigurationError, raise_for_status

CACHE_VARIABLE = "EVERROLL_DATA_CACHE"
_TIMEOUT = httpx.Timeout(connect=10.0, read=60.0, write=30.0, pool=10.0)
MAX_DOWNLOAD_SECONDS = 480.0
"""For all files of a data set: within the time that a run has for its preparation."""
_CHUNK_BYTES = 1 << 20


class DownloadCache:
    """Downloaded files of data sets: `<root>/<hash of the URLs>-<fingerprint>/<number><suffix>`.

    A directory appears whole, by a rename, so that workers of one machine may download at once and share what is
    there. The fingerprint in its name is that of the whole data set; whoever opens it checks it against the content.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _default_root()

    def find(self, locations: Sequence[Location], fingerprint: str) -> list[Path] | None:
        """Local paths of all files as they were downloaded before, if they were."""
        directory = self._directory(locations, fingerprint)
        return _paths_in(directory, locations) if directory.is_dir() else None

    @contextlib.contextmanager
    def download(self, locations: Sequence[Location]) -> Iterator[list[Path]]:
        """Local paths of all files, those behind URLs freshly downloaded into a directory that `keep` can keep.

        Raises:
            ConfigurationError: a server refuses, or no package for the URL's scheme is there.
            httpx.TransportError: the network fails; another attempt may help.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=".download-", dir=self.root))
        deadline = time.monotonic() + MAX_DOWNLOAD_SECONDS
        try:
            paths = _paths_in(directory, locations)
            for location, path in zip(locations, paths, strict=True):
                if location.url is not None:
                    _fetch(location.url, path, deadline)
            yield paths
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def keep(self, locations: Sequence[Location], paths: Sequence[Path], fingerprint: str) -> list[Path]:
        """Give downloaded files their place under the fingerprint that their content has; returns where they are."""
        directory = self._directory(locations, fingerprint)
        temporary = next(path.parent for path, location in zip(paths, locations, strict=True) if location.url)
        with contextlib.suppress(OSError):  # another worker was faster: its files are as good
            os.rename(temporary, directory)
        return _paths_in(directory, locations)

    def discard(self, locations: Sequence[Location], fingerprint: str) -> None:
        """Remove files that are not what their directory's name says."""
        shutil.rmtree(self._directory(locations, fingerprint), ignore_errors=True)

    def _directory(self, locations: Sequence[Location], fingerprint: str) -> Path:
        urls = "\n".join(f"{number} {location.url}" for number, location in enumerate(locations) if location.url)
        return self.root / f"{hashlib.sha256(urls.encode()).hexdigest()[:16]}-{fingerprint[:32]}"


def _default_root() -> Path:
    configured = os.environ.get(CACHE_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(configured) if configured else cache / "everroll" / "data"


def _paths_in(directory: Path, locations: Sequence[Location]) -> list[Path]:
    return [location.path or directory / f"{number:05d}{location.suffix}" for number, location in enumerate(locations)]


def _fetch(url: str, path: Path, deadline: float) -> None:
    with open(path, "wb") as file:
        if urlsplit(url).scheme in ("http", "https"):
            _fetch_http(url, file, deadline)
        else:
            _fetch_other(url, file, deadline)


def _fetch_http(url: str, file: BinaryIO, deadline: float) -> None:
    """Redirects are followed; credentials come from ~/.netrc and proxies from the environment, as httpx does it."""
    with (
        httpx.Client(timeout=_TIMEOUT, follow_redirects=True) as client,
        client.stream("GET", url) as response,
    ):
        if not response.is_success:
            response.read()
        try:
            raise_for_status(response)
        except RuntimeError as error:
            raise ConfigurationError(f"data file {url} cannot be downloaded: {error}") from error
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            file.write(chunk)
            _check_deadline(url, deadline)


def _fetch_other(url: str, file: BinaryIO, deadline: float) -> None:
    """Through fsspec, with whatever package of it knows the scheme."""
    scheme = urlsplit(url).scheme
    try:
        import fsspec  # type: ignore[import-untyped]

        source = fsspec.open(url, "rb")
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"data file {url}: {scheme}:// URLs are read through fsspec and its package for that scheme, which every "
            f"worker then needs (for s3: pip install fsspec s3fs): {error}"
        ) from error
    try:
        with source as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                file.write(chunk)
                _check_deadline(url, deadline)
    except FileNotFoundError as error:
        raise ConfigurationError(f"data file {url} cannot be downloaded: not found") from error


def _check_deadline(url: str, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ConfigurationError(f"data file {url} was not there after {MAX_DOWNLOAD_SECONDS:.0f} s; copy it by hand")
