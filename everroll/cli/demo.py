"""The command `demo`."""

from __future__ import annotations


def demo() -> None:
    """Train the calculator agent on this machine."""
