"""Where in a user's code an exception came from, as `file:line`."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_OWN = Path(__file__).resolve().parent
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))


def find_place(error: BaseException) -> str | None:
    """The innermost frame that is neither ours nor a library's; of an agent that is itself installed, the outermost
    that is not ours. None where there is no such frame, as when a function does not take what it is called with.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(Path(frame.filename))]
    written = [frame for frame in frames if not _is_below(Path(frame.filename), _INSTALLED)]
    if not frames:
        return None
    chosen = written[-1] if written else frames[0]
    return f"{_shorten(Path(chosen.filename))}:{chosen.lineno}"


def describe_error(error: BaseException) -> str:
    """Class, text and place."""
    place = find_place(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def _is_ours(path: Path) -> bool:
    """Or Python's own: `<frozen importlib>`, asyncio, threads."""
    standard = _is_below(path, _STANDARD) and not _is_below(path, _INSTALLED)
    return str(path).startswith("<") or _is_below(path, (_OWN,)) or standard


def _is_below(path: Path, directories: tuple[Path, ...]) -> bool:
    return any(path.resolve().is_relative_to(directory) for directory in directories)


def _shorten(path: Path) -> str:
    """Relative to where the worker was started, if it is below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
