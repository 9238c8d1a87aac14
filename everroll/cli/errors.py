"""How a command ends: a message for the person and an exit code, never a traceback for what the person can mend."""

from __future__ import annotations

BAD_INPUT = 2
"""Exit code for a faulty run file, an unknown run and the like."""
FAILED = 1
"""Exit code for a run or a stack that failed."""
INTERRUPTED = 130


class CommandError(Exception):
    """Ends a command with a message on standard error."""

    def __init__(self, message: str, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code
