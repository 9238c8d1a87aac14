"""A data set on this machine: its prompts by index, and the check that it is what the run started with."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from everroll.contracts.rollout import DatasetRef
from everroll.data.downloads import DownloadCache
from everroll.data.files import RowFile, open_row_file
from everroll.data.locations import Location, Paths, describe, expand, list_paths
from everroll.data.order import compute_prompt_index
from everroll.data.records import Prompt, Row, parse_row, summarize
from everroll.failures import ConfigurationError


class Dataset(Sequence[Prompt]):
    """Prompts read from their files one by one. Safe to use from several threads."""

    def __init__(self, files: Sequence[RowFile], fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._files = files
        self._starts: list[int] = []
        self._num_prompts = 0
        for file in files:
            self._starts.append(self._num_prompts)
            self._num_prompts += file.num_rows()

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self

    def __len__(self) -> int:
        return self._num_prompts

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]
        """Prompt `index`, from 0; slices are not offered."""
        if not 0 <= index < self._num_prompts:
            raise IndexError(f"prompt {index} of {self._num_prompts}")
        number = bisect.bisect_right(self._starts, index) - 1
        return parse_row(self._files[number].read(index - self._starts[number]), index)

    def is_unchanged(self) -> bool:
        """Whether all files are still those that were checked."""
        return all(file.is_unchanged() for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()


def load_dataset(paths: Paths | Path, fingerprint: str | None = None, cache: DownloadCache | None = None) -> Dataset:
    """Open a data set, download what is behind URLs, and check every row.

    With the `fingerprint` that it should have, an earlier download of it is taken from the cache.

    Raises:
        ConfigurationError: missing, empty, or rows that are no prompts; they are named by file and line.
        httpx.TransportError: a download failed; another attempt may help.
    """
    paths = str(paths) if isinstance(paths, Path) else paths
    source, locations = describe(paths), expand(paths)
    if all(location.path for location in locations):
        return _open_files([location.path for location in locations if location.path], source)
    cache = cache or DownloadCache()
    cached = cache.find(locations, fingerprint) if fingerprint else None
    if cached is not None and fingerprint is not None:
        with contextlib.suppress(ConfigurationError):
            dataset = _open_files(cached, source)
            if dataset.fingerprint == fingerprint:
                return dataset
            dataset.close()
        cache.discard(locations, fingerprint)
    return _download(locations, source, cache)


def _download(locations: Sequence[Location], source: str, cache: DownloadCache) -> Dataset:
    with cache.download(locations) as paths:
        dataset = _open_files(paths, source)
        dataset.close()
        kept = cache.keep(locations, paths, dataset.fingerprint)
    return _open_files(kept, source)


def _open_files(paths: Sequence[Path], source: str) -> Dataset:
    files: list[RowFile] = []
    try:
        for path in paths:
            files.append(open_row_file(path))
        summary = summarize(_scan(files), source)
    except BaseException:
        for file in files:
            file.close()
        raise
    return Dataset(files, summary.fingerprint)


def _scan(files: Sequence[RowFile]) -> Iterator[Row]:
    for file in files:
        yield from file.scan()


class DatasetCache:
    """Data sets that one worker process has open, each checked against the fingerprint that the run started with."""

    def __init__(self, downloads: DownloadCache | None = None) -> None:
        self._downloads = downloads
        self._datasets: dict[tuple[tuple[str, ...], str], Dataset] = {}
        self._lock = threading.Lock()

    def get(self, reference: DatasetRef) -> Dataset:
        """The data set as it was when the run started. Blocks while it is read: call it on a thread.

        Raises:
            ConfigurationError: missing, unreadable, or changed since; both fingerprints are named.
        """
        key = (tuple(list_paths(reference.path)), reference.fingerprint)
        with self._lock:
            dataset = self._datasets.get(key)
            if dataset is not None and dataset.is_unchanged():
                return dataset
            # Not closed when it is replaced: an episode may be reading from it.
            self._datasets.pop(key, None)
            dataset = load_dataset(reference.path, reference.fingerprint, self._downloads)
            if dataset.fingerprint != reference.fingerprint:
                raise ConfigurationError(
                    f"data set {describe(reference.path)} changed since the run started: its fingerprint was "
                    f"{reference.fingerprint} and is now {dataset.fingerprint}. Restore the files, or start a new run."
                )
            self._datasets[key] = dataset
            return dataset

    async def find_prompt(self, reference: DatasetRef, group: int, index: int | None = None) -> Prompt:
        """The prompt that a group plays: `index` where the run chose it, else the one of the deterministic order.

        Raises:
            ConfigurationError: as `get`.
        """
        if index is None:
            index = compute_prompt_index(group, reference.num_prompts, reference.seed, reference.shuffle)
        return await asyncio.to_thread(self._read, reference, index)

    def _read(self, reference: DatasetRef, index: int) -> Prompt:
        return self.get(reference)[index]
