"""Rows of a Parquet file, read a row group at a time. Needs pyarrow (`pip install 'everroll[parquet]'`)."""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everroll.data.files import FileStamp
from everroll.data.records import COLUMNS, Row, drop_nulls
from everroll.failures import ConfigurationError

try:
    import pyarrow
    import pyarrow.parquet
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"Parquet needs the package {error.name} on every worker; install it with: pip install 'everroll[parquet]'"
    ) from error

_SCAN_ROWS = 1024
_KEPT_GROUPS = 4
"""Row groups held decoded, the latest used; with a shuffled order each prompt may need another one."""


class ParquetRows:
    """Columns `messages` (list of structs) or `text`, and `label` and `metadata` (a struct, a map, or JSON as text)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = FileStamp(path)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ConfigurationError(f"data set {path} is not Parquet: {error}") from error
        names = self._file.schema_arrow.names
        unknown = sorted(set(names) - set(COLUMNS))
        if unknown:
            raise ConfigurationError(
                f"data set {path} has unknown columns {unknown}; put what the agent needs into `metadata`"
            )
        metadata = self._file.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = [sum(counts[:group]) for group in range(len(counts))]
        self._num_rows = int(metadata.num_rows)
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def scan(self) -> Iterator[Row]:
        number = 0
        for batch in self._file.iter_batches(batch_size=_SCAN_ROWS):
            for record in _to_records(batch):
                number += 1
                yield Row(f"{self.path} row {number}", record)

    def read(self, row: int) -> Row:
        group = bisect.bisect_right(self._starts, row) - 1
        with self._lock:  # pyarrow's readers are not for several threads at once
            table = self._load_group(group)
        (record,) = _to_records(table.slice(row - self._starts[group], 1))
        return Row(f"{self.path} row {row + 1}", record)

    def num_rows(self) -> int:
        return self._num_rows

    def is_unchanged(self) -> bool:
        return self._stamp.is_current()

    def close(self) -> None:
        self._file.close()

    def _load_group(self, group: int) -> Any:
        if group not in self._groups:
            self._groups[group] = self._file.read_row_group(group)
            while len(self._groups) > _KEPT_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group]


def _to_records(rows: Any) -> list[dict[str, Any]]:
    """Rows of a table or batch as mappings without nulls, maps as mappings."""
    return [drop_nulls(record) for record in rows.to_pylist(maps_as_pydicts="strict")]
