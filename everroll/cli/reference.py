"""`everroll run-file-reference`: the generated documentation of run files."""

from __future__ import annotations


def run_file_reference() -> None:
    """Print the reference of run files (docs/run-file.md)."""
    from everroll.runfile_reference import render_run_file_reference

    print(render_run_file_reference(), end="")
