"""Commands about the local stack: up, down."""

from __future__ import annotations


def up() -> None:
    """Start the local stack."""


def down() -> None:
    """Stop the local stack."""
