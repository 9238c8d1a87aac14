"""Readers of one local file each: all rows in order once, then any row by its number, without the file in memory."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from everroll.data.records import Row
from everroll.failures import ConfigurationError

_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip"})


class RowFile(Protocol):
    """One file of rows. `scan` must have been exhausted before `read`."""

    path: Path

    def scan(self) -> Iterator[Row]:
        """All rows in order; builds the index that `read` needs."""

    def read(self, row: int) -> Row:
        """Row `row`, from 0. Safe to call from several threads."""

    def num_rows(self) -> int: ...

    def is_unchanged(self) -> bool:
        """Whether the file is, by size and time of change, what was scanned."""

    def close(self) -> None: ...


def open_row_file(path: Path) -> RowFile:
    """By suffix: `.parquet` is Parquet, anything else JSONL.

    Raises:
        ConfigurationError: missing, unreadable, compressed, or Parquet without the package to read it.
    """
    if path.suffix in _COMPRESSED:
        raise ConfigurationError(f"data file {path} is compressed, so that rows cannot be read one by one: unpack it")
    try:
        if path.suffix == ".parquet":
            from everroll.data.parquet import ParquetRows

            return ParquetRows(path)
        return JsonLines(path)
    except OSError as error:
        raise ConfigurationError(f"data set {path} cannot be read: {error}") from error


class FileStamp:
    """Size and time of change of an open file: tells cheaply that it may have changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._take()

    def is_current(self) -> bool:
        try:
            return self._take() == self._stamp
        except OSError:
            return False

    def _take(self) -> tuple[int, int, int]:
        status = os.stat(self._path)
        return status.st_ino, status.st_size, status.st_mtime_ns


class JsonLines:
    """One JSON object a line; blank lines do not count. The index holds 16 bytes a row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = FileStamp(path)
        self._handle = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._handle)
        self._starts = array("Q")
        self._line_numbers = array("Q")

    def scan(self) -> Iterator[Row]:
        start = 0
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._starts.append(start)
                    self._line_numbers.append(number)
                    yield Row(f"{self.path} line {number}", line)
                start += len(line)

    def read(self, row: int) -> Row:
        start = self._starts[row]
        end = self._starts[row + 1] if row + 1 < len(self._starts) else os.fstat(self._handle).st_size
        # Blank lines that follow are read too; JSON takes them for white space.
        body = os.pread(self._handle, end - start, start)
        return Row(f"{self.path} line {self._line_numbers[row]}", body)

    def num_rows(self) -> int:
        return len(self._starts)

    def is_unchanged(self) -> bool:
        return self._stamp.is_current()

    def close(self) -> None:
        self._close()
