"""Where the files of a data set are: paths, globs and URLs, in a fixed order."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from everroll.failures import ConfigurationError

Paths = str | Sequence[str]
"""What a run file says: one path, glob or URL, or several."""


@dataclass(frozen=True)
class Location:
    """One file: on this machine, or behind a URL."""

    path: Path | None
    url: str | None

    @property
    def suffix(self) -> str:
        """Of the file's name, which tells its format."""
        return self.path.suffix if self.path else PurePosixPath(urlsplit(self.url or "").path).suffix


def list_paths(paths: Paths) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def is_url(text: str) -> bool:
    return "://" in text and not text.startswith("file://")


def is_glob(text: str) -> bool:
    return any(sign in text for sign in "*?[")


def describe(paths: Paths) -> str:
    return ", ".join(list_paths(paths))


def expand(paths: Paths) -> list[Location]:
    """All files in the order in which their rows are numbered: as written, the matches of a glob sorted by name.

    An existing file whose name has the signs of a glob is that file.

    Raises:
        ConfigurationError: nothing is named, a glob matches nothing, a directory is named, or a file is named twice.
    """
    locations = [location for text in list_paths(paths) for location in _expand_one(text)]
    if not locations:
        raise ConfigurationError("data.path names no file")
    seen: set[Location] = set()
    for location in locations:
        if location in seen:
            raise ConfigurationError(f"data.path names {location.path or location.url} twice")
        seen.add(location)
    return locations


def _expand_one(text: str) -> list[Location]:
    if is_url(text):
        return [Location(None, text)]
    path = Path(text.removeprefix("file://"))
    if path.is_dir():
        raise ConfigurationError(f"data set {path} is a directory; name its files, e.g. {path}/*.jsonl")
    if path.exists() or not is_glob(text):
        return [Location(path, None)]
    matches = sorted(name for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not matches:
        raise ConfigurationError(f"data set {path} matches no file")
    return [Location(Path(name), None) for name in matches]
