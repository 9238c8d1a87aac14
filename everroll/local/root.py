"""Find the repository root: workers run from the packages that stand there, not from the installed library."""

from __future__ import annotations

import os
from pathlib import Path

import everroll
from everroll.local.state import StackError

_MARKERS = ("worker/__main__.py", "workflows/__init__.py", "activities/__init__.py")


def find_root() -> Path:
    """The directory that holds `worker/`, `workflows/` and `activities/`.

    Looked for in `EVERROLL_ROOT`, the working directory and its parents, and beside the `everroll` package.

    Raises:
        StackError: it is in none of them.
    """
    told = os.environ.get("EVERROLL_ROOT")
    if told:
        if is_root(Path(told)):
            return Path(told).resolve()
        raise StackError(f"EVERROLL_ROOT={told} holds no Everroll repository (worker/, workflows/, activities/)")
    here = Path.cwd()
    beside = Path(str(everroll.__file__)).resolve().parent.parent
    for candidate in (here, *here.parents, beside):
        if is_root(candidate):
            return candidate
    raise StackError(
        "the workers' code (worker/, workflows/, activities/) was not found in the working directory or its parents. "
        "It is not part of the installed package: run from a clone of the repository, or set EVERROLL_ROOT to one."
    )


def is_root(path: Path) -> bool:
    return all((path / marker).is_file() for marker in _MARKERS)
