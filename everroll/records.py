"""Files of records, one JSON object a line, to which several processes add: each record once, never half a one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def append_once(path: Path, record: dict[str, Any], is_same: Callable[[dict[str, Any]], bool]) -> bool:
    """Add the record, unless a line for which `is_same` holds is there; returns whether it was added.

    Writers take turns. A last line that a crash cut short is replaced. Blocks while another writes: a moment.

    Raises:
        OSError: it cannot be written.
        ValueError: what stands there is no record.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if any(is_same(json.loads(line)) for line in whole.splitlines()):
            return False
        if len(whole) < len(content):
            file.truncate(len(whole))
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return True
