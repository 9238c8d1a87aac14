"""Logs as one JSON object a line on standard error; for processes, set up in `main()`, never at import."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_NOISY = {
    "httpx": logging.WARNING,
    "httpx2": logging.WARNING,
    "openai": logging.WARNING,
    "aiohttp.access": logging.WARNING,
    "temporalio.worker": logging.INFO,
}


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(process: str, level: int = logging.INFO) -> None:
    """Send all records of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name, threshold in _NOISY.items():
        logging.getLogger(name).setLevel(threshold)
